"""Texts without a label, from the table or from a file, and texts that describe the classes."""

from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.data.load import load_splits, with_few_label_texts
from finetune.errors import DataError
from finetune.events import Event, sent_to

LABELED = [f"question {number},{'ab'[number % 2]}" for number in range(40)]


def load(tmp_path: Path, *lines: str, **options: Any) -> list[str] | None:
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["text,label", *LABELED, *lines]))
    config = DataConfig(str(table), **options)
    unlabeled = with_few_label_texts(load_splits(config), config).unlabeled
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


def describe(tmp_path: Path, name: str, content: str, **options: Any) -> dict[str, str]:
    rows = [f"question {number},{('card_fee', 'top-up')[number % 2]}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / name).write_text(content)
    config = DataConfig(
        str(tmp_path / "rows.csv"), class_descriptions=str(tmp_path / name), **options
    )
    loaded = with_few_label_texts(load_splits(config), config)
    assert loaded.names is not None
    assert loaded.sources[-1].sha256
    classes = [loaded.task.class_names[number] for number in loaded.names["label"]]
    return dict(zip(classes, loaded.names["text"], strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "class,description\ncard_fee,\"a fee, charged\"\ntop-up,money added\n"),
        ("b.csv", "top-up, money added\ncard_fee,\"a fee, charged\"\n"),
        ("c.tsv", "n\ttext\tcategory\n1\tmoney added\ttop-up\n2\ta fee, charged\tcard_fee\n"),
        ("d.jsonl", '{"about": "a fee, charged", "id": "card_fee"}\n'
                    '{"about": "money added", "id": "top-up"}\n'),
    ],
)  # fmt: skip
def test_descriptions_of_classes_are_found_in_any_table(
    tmp_path: Path, name: str, content: str
) -> None:
    expected = {"card_fee": "a fee, charged", "top-up": "money added"}
    assert describe(tmp_path, name, content) == expected


def test_a_class_without_a_description_keeps_its_name(tmp_path: Path) -> None:
    events: list[Event] = []
    with sent_to(events.append):
        described = describe(tmp_path, "a.csv", "top-up,money added\ncard_fee,\n")
    assert described == {"card_fee": "card fee", "top-up": "money added"}
    assert "without a description, which keep their name: card_fee" in str(events)


@pytest.mark.parametrize(
    "content",
    [
        "topup,money added\ncard_fee,a fee\n",
        "top-up,money added\ntop-up,a gift\n",
        "good,bad\nup,down\n",
        "top-up\ncard_fee\n",
    ],
)
def test_wrong_descriptions_are_errors(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="does not have a class of the data") as raised:
        describe(tmp_path, "a.csv", content)
    assert "the classes are card_fee, top-up" in raised.value.remedy
