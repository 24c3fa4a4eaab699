"""In-memory tables, results and loaded models, as used in notebooks."""

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from scipy.sparse import csr_matrix
from tiny_runs import QUICK, TEXTS

import finetune
from finetune.config.schema import DataConfig
from finetune.data.in_memory import write_table
from finetune.data.load import load_splits
from finetune.errors import FinetuneError, NotARunError
from finetune.files import file_sha256
from finetune.runs.results import RunResults
from finetune.runs.trained import TrainedModel
from finetune.tasks.tables import DisplayMixin

OPTIONS = {name: QUICK[name] for name in QUICK if name not in ("data", "max_train_samples")}
Row = namedtuple("Row", "text label")
SOME, CLASSES = ["who is it", "where is it", "who was it", "where was it"], ["HUM", "LOC"] * 2
ROWS = [*zip(SOME, CLASSES, strict=True)]
NUMBERED = Dataset.from_dict(
    {"text": SOME, "label": [1, 0, 1, 0]},
    features=Features(text=Value("string"), label=ClassLabel(names=["LOC", "HUM"])),
)
TABLE = {"text": SOME, "label": CLASSES}
MARKS = np.array([[0, 1], [1, 0], [0, 1], [1, 0]])
KINDS: dict[str, Any] = {
    "columns": TABLE,
    "frame": pandas.DataFrame(TABLE),
    "categories": pandas.DataFrame(TABLE).astype({"label": "category"}),
    "frame with numbers as names": pandas.DataFrame(ROWS),
    "series": (pandas.Series(SOME), pandas.Series(CLASSES)),
    "dicts": [dict(text=text, label=label) for text, label in ROWS],
    "tuples": ROWS,
    "label first": [(label, text) for text, label in ROWS],
    "zip": zip(SOME, CLASSES, strict=True),
    "named tuples": [Row(*row) for row in ROWS],
    "texts and labels": (SOME, CLASSES),
    "numpy": (np.array(SOME), np.array(CLASSES)),
    "matrix": np.array(ROWS, dtype=object),
    "columns of matrices": (np.array(SOME)[:, None], np.array(CLASSES)[:, None]),
    "frames": (pandas.DataFrame(TABLE)[["text"]], pandas.DataFrame(TABLE)[["label"]]),
    "frames of marks": (SOME, pandas.DataFrame({"HUM": [1, 0, 1, 0], "LOC": [0, 1, 0, 1]})),
    "records": np.array(ROWS, dtype=[("text", object), ("label", "U3")]),
    "texts by label": {"HUM": SOME[::2], "LOC": SOME[1::2]},
    "bunch": {"data": SOME, "target": np.array([1, 0, 1, 0]), "target_names": ["LOC", "HUM"]},
    "bunch of marks": {"data": SOME, "target": MARKS, "target_names": ["LOC", "HUM"]},
    "arrow": pa.table(TABLE),
    "reader": pa.table(TABLE).to_reader(),
    "views": pa.table({name: pa.array(own, pa.string_view()) for name, own in TABLE.items()}),
    "extension": pa.table(
        {"text": pa.ExtensionArray.from_storage(pa.json_(), pa.array(SOME)), "label": CLASSES}
    ),
    "dataset": NUMBERED,
    "iterable dataset": NUMBERED.to_iterable_dataset(),
    "lazy columns": {"text": NUMBERED["text"], "label": CLASSES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_table_is_read_as_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = write_table(KINDS[kind], tmp_path)
    loaded = load_splits(DataConfig(str(path), test_fraction=0.5))
    names = loaded.task.class_names
    rows = [row for split in loaded.splits.values() for row in split.to_pylist()]
    assert {(row["text"], names[row["label"]]) for row in rows} == {*ROWS}


@pytest.mark.parametrize(
    "labels",
    [
        MARKS[:, 1:],
        MARKS[:, 1:].astype(object),
        torch.tensor(MARKS[:, 1:], dtype=torch.float, requires_grad=True),
        csr_matrix(MARKS[:, 1:]),
        [[1], [0], [1], [0]],
    ],
)
def test_single_column_of_zeros_and_ones_is_single_label(labels: Any, tmp_path: Path) -> None:
    path = write_table((SOME, labels), tmp_path)
    loaded = load_splits(DataConfig(str(path), test_fraction=0))
    assert (loaded.task.name, loaded.task.class_names) == ("single", ["0", "1"])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"text": SOME, "label": ["x"]}, "(texts, labels)"),
        (SOME, "one column, 'text', and no labels"),
        (iter(SOME), "are not a text and a label"),
        ([None], "(texts, labels)"),
        ([], "no rows"),
        (pandas.DataFrame(), "no rows"),
        (pandas.DataFrame(ROWS, columns=["text", "text"]), "duplicate column name in the table"),
        ([("a\ud800", "x"), ("b", "y")], "can't be written as UTF-8"),
        ({"test": pandas.DataFrame(TABLE)}, "no training split in test"),
        ((SOME, MARKS / 3), "should contain only 0 and 1 for each class"),
        ((SOME, MARKS * 3), "array.argmax(axis=1)"),
        ((SOME, (MARKS / 3).tolist()), "'label' has lists of numbers"),
        ((SOME, MARKS.tolist()), "lists of numbers, such as"),
        ({"train": "none.csv", "dev": "none.csv"}, "the same file"),
        ({"train": (SOME, CLASSES), "test": (SOME, ["x"] * 4)}, "'x'"),
    ],
)
def test_unsupported_table_is_rejected_with_the_accepted_types(table: Any, words: str) -> None:
    with pytest.raises(FinetuneError) as raised:
        finetune.run(table)
    assert words in f"{raised.value.message} {raised.value.remedy}"


@pytest.fixture(scope="module")
def frame() -> pandas.DataFrame:
    """Questions with two classes and a custom index."""
    loaded = load_splits(DataConfig("questions"))
    frame = loaded.splits["train"].to_pandas()
    frame["label"] = frame["label"].map(loaded.task.class_names.__getitem__)
    frame = frame[frame["label"].isin(["HUM", "LOC"])].reset_index(names="number")
    return frame.sample(60, random_state=0).rename(columns={"text": "question"})


@pytest.fixture(scope="module")
def results(
    frame: pandas.DataFrame, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunResults:
    """A run on a DataFrame, trained in another working directory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("notebook"))
        return finetune.run(frame, model=tiny_folder, **OPTIONS)


def test_run_saves_its_table_and_can_be_repeated_from_any_folder(
    results: RunResults, frame: pandas.DataFrame, tmp_path: Path
) -> None:
    folder = Path(results)
    assert folder.is_absolute()
    assert results.evaluate(device="cpu").scores.metrics == results.test.metrics
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    [kept] = folder.glob("table-*.parquet")
    assert f'"{kept}": "{file_sha256(kept)}"' in (folder / "manifest.json").read_text()
    assert finetune.run(resume_from_checkpoint=results).test.metrics == results.test.metrics
    again = finetune.run(folder / "config.yaml", output_dir=tmp_path / "again")
    assert again.test.metrics == results.test.metrics
    other = finetune.evaluate(results, data=frame.head(9), device="cpu")
    assert other.records()[0]["rows"] == "the table"


def test_private_run_on_splits_deletes_its_tables_and_lists_ignored_splits(
    frame: pandas.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_pandas(frame[["question", "label"]], preserve_index=False)
    splits = DatasetDict(train=rows.select(range(40)), test=rows.select(range(40, 60)), rest=rows)
    options: dict[str, Any] = {**OPTIONS, "num_train_epochs": 1, "validation_fraction": 0}
    with pytest.warns(UserWarning, match="these splits are ignored: rest"):
        private = finetune.run(splits, model=tiny_folder, private_data=True, **options)
    assert private.test.samples == 20
    assert "these splits are ignored: rest" in private.warnings
    assert not [*tmp_path.rglob("table-*.parquet")]
    with pytest.raises(NotARunError, match="its copy was deleted"):
        private.evaluate()


def test_text_columns_are_classified_like_lists(
    results: RunResults, frame: pandas.DataFrame
) -> None:
    model, table = finetune.load(results, device="cpu"), frame[["question"]].head(5)
    expected = model.predict([*table["question"]])
    for texts in (table, table.values, table.values.tolist(), table.to_numpy(str)):
        assert [one.label for one in model.predict(texts)] == [one.label for one in expected]


def test_predict_reads_path_objects_as_files_and_rejects_file_names(
    results: RunResults, frame: pandas.DataFrame, tmp_path: Path
) -> None:
    table, path = frame[["question"]].head(5), tmp_path / "new.csv"
    expected = [one.label for one in finetune.predict(results, table, device="cpu")]
    table.to_csv(path, index=False)
    assert [one.label for one in finetune.predict(results, path, device="cpu")] == expected
    (tmp_path / "new.txt").write_text("\n".join(table["question"]))
    assert [one.label for one in finetune.predict(results, tmp_path / "new.txt")] == expected
    with pytest.raises(FinetuneError, match="is the name of a file") as raised:
        finetune.predict(results, str(path))
    assert f"pathlib.Path({str(path)!r})" in raised.value.remedy
    assert len(finetune.predict(results, [str(path)])) == 1


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([1, 2], "[1, 2], of type list, is not a list of texts"),
        ([("a", "b"), ("c", "d")], "is not a list of texts pass a list of single texts for this"),
        (pandas.DataFrame({"a": ["one text", "another"], "b": ["more text", "and more"]}),
         "pass only the texts, such as table['text']"),
        (Path("none.csv"), "file not found: none.csv"),
    ],
)  # fmt: skip
def test_prediction_errors_use_python_terms(results: RunResults, texts: Any, words: str) -> None:
    with pytest.raises(FinetuneError) as raised:
        finetune.predict(results, texts, device="cpu")
    message = f"{raised.value.message} {raised.value.remedy}"
    assert words in message
    assert not re.search(r"--\w|Chunked|text_column", message)


def test_loaded_model_is_not_loaded_again(
    results: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = finetune.load(results, device="cpu")
    monkeypatch.setattr(TrainedModel, "load", None)
    found = [model.predict([text])[0].label for text in TEXTS]
    assert found == [one.label for one in model.predict(TEXTS, all_scores=True)]


def test_results_have_a_repr_of_five_lines_and_an_html_table(results: RunResults) -> None:
    long = finetune.predict(results, ["Who? " * 300] * 30, device="cpu", all_scores=True)
    evaluation = finetune.evaluate(results, device="cpu")
    shown: list[DisplayMixin] = [results, results.test, long, long[0], evaluation]
    for one in shown:
        assert 2 <= len(repr(one).splitlines()) <= 5
        assert len(repr(one)) <= 800
        assert "<table" in one._repr_html_()
        assert len(one.to_pandas()) == len(one.records())
    assert f"accuracy {results.test.accuracy:.4g}" in repr(results)
