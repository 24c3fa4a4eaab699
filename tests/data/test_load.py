"""The names of the data."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import LoadedData
from finetune.data.load import load_data, load_rows
from finetune.errors import DataError, DataNotFoundError, UsageError
from finetune.events import Event, sent_to
from finetune.tasks.single import Single


def load(data: str | Path, *, emitted: list[Event] | None = None, **options: Any) -> LoadedData:
    emit = ([] if emitted is None else emitted).append
    with sent_to(emit):
        return load_data(DataConfig(str(data), **options))


def test_a_file_is_read_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nyes,1\nno,0\n")
    (tmp_path / "b.csv").write_text("text,label\nno way,0\n")
    loaded = load(
        tmp_path / "a.csv",
        test_file=str(tmp_path / "b.csv"),
        text_column="text",
        label_column="label",
    )
    assert [source.name for source in loaded.sources] == [f"{tmp_path}/{n}.csv" for n in "ab"]
    assert [source.sha256 for source in loaded.sources] == [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.csv", "b.csv")
    ]
    assert {split: rows["text"][:] for split, rows in loaded.splits.items()} == {
        "train": ["yes", "no"],
        "test": ["no way"],
    }


def test_a_file_that_is_missing_is_not_taken_for_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"nothing\.csv"):
        load(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("name", "guess"),
    [("TREC", "trec"), ("question", "questions"), ("imdb", ""), ("acme/rows", "hub:acme/rows")],
)
def test_an_unknown_name_gets_a_list_and_a_guess(name: str, guess: str) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        load(name)
    assert "trec, questions, a file" in raised.value.remedy
    assert (f"did you mean {guess}?" in raised.value.remedy) == bool(guess)


@pytest.mark.parametrize(
    ("source", "options", "flag"),
    [
        ("questions", {"data_dir": "trec"}, "--data-dir"),
        ("trec", {"encoding": "cp1252"}, "--encoding"),
        ("rows.csv", {"data_dir": "trec"}, "--data-dir"),
        ("hub:acme/rows", {"validation_file": "dev.csv"}, "--validation-file"),
        ("hub:acme/rows", {"label": "label-fine"}, "--label"),
    ],
)
def test_an_option_that_the_data_does_not_know_is_refused(
    source: str, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError, match=f"{source} takes no {flag}") as raised:
        load(source, **options)
    assert "leave it out" in raised.value.remedy


def test_one_file_for_two_splits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\nyes,1\nno,0\n")
    with pytest.raises(UsageError, match="two splits"):
        load(path, test_file=str(tmp_path / "." / "a.csv"))


def test_a_name_that_is_not_utf8_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="is not UTF-8"):
        load("caf\udce9.csv")
    with pytest.raises(UsageError, match="is not UTF-8"):
        load("trec", data_dir="caf\udce9")
    with pytest.raises(UsageError):
        load("a\0.csv")
    with pytest.raises(DataNotFoundError):
        load("ünbekannt.csv")


def test_all_rows_of_other_data_get_the_numbers_of_the_classes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nyes,b\nno,a\n")
    options = OtherData(str(tmp_path / "a.csv"), test_file="other.csv")
    rows = load_rows(options, task=Single(["c", "b", "a"]))
    assert rows["label"][:] == [1, 2]
    assert rows.features["label"].names == ["c", "b", "a"]
    classes = [str(number) for number in range(500)]
    with pytest.raises(DataError, match="the model does not know: a, b") as raised:
        load_rows(options, task=Single(classes))
    assert raised.value.remedy.endswith("18, 19 and 480 others")
