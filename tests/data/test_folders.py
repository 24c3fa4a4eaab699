"""Texts as files, in folders of their classes."""

from pathlib import Path

import pytest
from datasets import DatasetDict, load_from_disk

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import make_dataset
from finetune.data.folders import digest_folder
from finetune.data.load import load_data, load_rows
from finetune.errors import DataError, DataNotFoundError, DataUnreadableError
from finetune.events import Event, Info, sent_to
from finetune.tasks.single import Single


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def rows_of(root: Path, emitted: list[Event] | None = None) -> dict[str, list[tuple[str, str]]]:
    options = DataConfig(str(root))
    with sent_to(([] if emitted is None else emitted).append):
        loaded = load_data(options)
    names = loaded.task.class_names
    return {
        split: [(row["text"], names[row["label"]]) for row in rows]
        for split, rows in loaded.splits.items()
    }


def test_splits_and_classes_are_folders(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        **{"train__neg__1_1.txt": "dull", "train__pos__0_9.txt": "great\nfun"},
        **{"train__unsup__1.txt": "what", "test__pos__7.txt": "schön", "test__neg__.hidden": "x"},
        **{"train__neg__note.html": "<p>", "README": "about", "train__urls.txt": "x"},
    )  # fmt: skip
    emitted: list[Event] = []
    assert rows_of(root, emitted) == {
        "train": [("dull", "neg"), ("great\nfun", "pos")],
        "test": [("schön", "pos")],
    }
    said = [event.message for event in emitted if isinstance(event, Info)]
    assert any("2 texts in 2 folders, encoding" in one for one in said)
    assert rows_of(root / "train") == {"train": [("dull", "neg"), ("great\nfun", "pos")]}
    with pytest.raises(DataError, match="several splits: test, train"):
        load_rows(OtherData(str(root)), task=Single(["neg", "pos"]))


def test_files_need_no_suffix_and_names_of_splits_may_end_longer_ones(tmp_path: Path) -> None:
    texts = {"20news-train__alt.atheism__53068": "one", "20news-train__sci.med__58000": "two"}
    root = write(tmp_path, **texts, **{"20news-test__sci.med__59000": "three"})
    assert list(rows_of(root)) == ["test", "train"]


def test_the_remedy_for_a_data_set_saved_to_disk_gives_a_table_that_is_read(tmp_path: Path) -> None:
    train = make_dataset(["one", "two"], ["a", "b"], task=Single(["a", "b"]))
    DatasetDict(train=train, test=train).save_to_disk(tmp_path / "saved")
    for saved in (tmp_path / "saved", tmp_path / "saved/train"):
        with pytest.raises(DataUnreadableError, match="the datasets library has saved") as raised:
            rows_of(saved)
        assert f"datasets.load_from_disk('{tmp_path}/saved/train')" in raised.value.remedy
    table = tmp_path / "train.parquet"
    load_from_disk(str(tmp_path / "saved/train")).to_parquet(table)
    assert rows_of(table) == {"train": [("one", "a"), ("two", "b")]}


def test_a_folder_without_classes_is_refused_and_a_changed_text_changes_the_digest(
    tmp_path: Path,
) -> None:
    root = write(tmp_path / "plain", **{"a.html": "one", "b.html": "two"})
    with pytest.raises(DataNotFoundError, match=r"no tables, and no \.txt files in folders"):
        rows_of(root)
    one = write(tmp_path / "one", a__1="x", b__1="y")
    digests = {digest_folder(one)}
    digests.add(digest_folder(write(one, a__1="z")))
    digests.add(digest_folder(write(tmp_path / "other", c__1="z", b__1="y")))
    assert len(digests) == 3


def test_the_file_in_another_encoding_than_the_others_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, a__1="schön", b__1="schön\ngrün")
    (root / "b/2").write_bytes("one\nschön".encode("cp1252"))
    with pytest.raises(DataUnreadableError, match=r"line 2 of .*b/2 is not UTF-8"):
        rows_of(root)
