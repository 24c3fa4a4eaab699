"""Texts without a label: rows of the table, or those of a file."""

from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.data.load import load_splits

LABELED = [f"question {number},{'ab'[number % 2]}" for number in range(40)]


def load(tmp_path: Path, *lines: str, **options: Any) -> list[str] | None:
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["text,label", *LABELED, *lines]))
    unlabeled = load_splits(DataConfig(str(table), **options)).unlabeled
    return None if unlabeled is None else sorted(unlabeled["text"].to_pylist())


def test_rows_without_a_label_are_kept_once_and_only_if_no_split_has_the_text(
    tmp_path: Path,
) -> None:
    lines = ("what is new,", "what is new,", "question 7,", '"  ",')
    assert load(tmp_path, *lines) == ["what is new"]
    assert load(tmp_path, *lines, unlabeled="none") is None
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("new.txt", "one\n\ntwo\nquestion 7\n"),
        ("new.csv", "id,text\n1,one\n2,two\n3,\n4,question 7\n"),
        ("new.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": null}\n{"text": "question 7"}\n'),
    ],
)
def test_texts_of_a_file_are_read_as_they_are(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    texts = load(tmp_path, "not this one,", unlabeled=str(file))
    assert texts == ["one", "question 7", "two"]
