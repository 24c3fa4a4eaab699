"""What a look at data finds."""

import os
from pathlib import Path

import numpy as np
import pytest
from datasets import DatasetDict

from finetune.data.check import (
    check_splits,
    find_conflicts,
    find_overlap,
    find_repeats,
    find_short_texts,
    measure_lengths,
    suggest_changes,
    suggest_max_length,
    weigh_classes,
)
from finetune.data.tables import make_table
from finetune.data.trec import load_trec

TREC_DIR = Path(
    os.environ.get("TREC_DIR", Path(__file__).parent.parent.parent.parent / "shared" / "trec")
)
needs_trec = pytest.mark.skipif(
    not (TREC_DIR / "train_5500.label").is_file(),
    reason="needs TREC's train_5500.label in the folder TREC_DIR",
)


def splits_of(**rows: list[tuple[str, str]]) -> DatasetDict:
    classes = sorted({label for pairs in rows.values() for _, label in pairs})
    return DatasetDict(
        {
            split: make_table(*zip(*pairs, strict=True), classes=classes)
            for split, pairs in rows.items()
        }
    )


def test_repeats_are_counted_letter_for_letter_and_up_to_case() -> None:
    found = find_repeats(["Who?", "What?", "Who?", "who ?", "WHO?", "Who?", "what?"])
    assert (found["rows"], found["texts"]) == (2, 1)
    assert (found["rows_up_to_case"], found["texts_up_to_case"]) == (4, 2)
    assert found["examples"] == ["Who?", "What?"]


@needs_trec
def test_the_repeats_of_trec_are_those_that_are_known() -> None:
    fine = load_trec(folder=TREC_DIR, label="label-fine", emit=lambda event: None)
    findings = check_splits(fine)
    assert findings["rows"] == {"train": 5452}
    repeats = findings["repeats"]["train"]
    assert (repeats["rows"], repeats["texts"]) == (71, 63)
    assert findings["conflicts"]["train"]["texts"] == 1
    assert findings["conflicts"]["train"]["examples"][0]["labels"] == ["NUM:count", "NUM:other"]


def test_a_text_with_several_labels_is_a_conflict() -> None:
    texts = ["Who?", "who? ", "What?", "What?", "Why?"]
    found = find_conflicts(texts, ["b", "a", "c", "c", "d"])
    assert found == {"texts": 1, "examples": [{"text": "Who?", "labels": ["a", "b"]}]}


def test_short_texts_are_found_in_any_script() -> None:
    found = find_short_texts(["ok", "", " \n", "yes", "好的", "早上好", "?"])
    assert found == {"rows": 5, "empty": 2, "examples": ["ok", "", " \n"]}


def test_rows_that_stand_in_training_are_told_with_both_labels() -> None:
    found = find_overlap(
        ["What are the Twin Cities ?", "who is it ?", "When ?"],
        ["LOC", "HUM", "NUM"],
        train_texts=["What are the twin cities ?", "Who is  it ?", "Who is it ?"],
        train_labels=["DESC", "HUM", "DESC"],
    )
    assert (found["rows"], found["disagreeing"]) == (2, 1)
    assert found["examples"] == [
        {"text": "What are the Twin Cities ?", "label": "LOC", "train_labels": ["DESC"]},
        {"text": "who is it ?", "label": "HUM", "train_labels": ["DESC", "HUM"]},
    ]


@needs_trec
def test_the_test_question_of_trec_that_training_labels_otherwise_is_found(tmp_path: Path) -> None:
    train = (TREC_DIR / "train_5500.label").read_bytes()
    (tmp_path / "train_5500.label").write_bytes(train)
    (tmp_path / "TREC_10.label").write_text(
        "LOC:other What are the Twin Cities ?\nNUM:date When does the harbour festival begin ?\n"
    )
    splits = load_trec(folder=tmp_path, label="label-coarse", emit=lambda event: None)
    overlap = check_splits(splits)["overlap"]["test"]
    assert (overlap["rows"], overlap["disagreeing"]) == (1, 1)
    assert overlap["examples"] == [
        {"text": "What are the Twin Cities ?", "label": "LOC", "train_labels": ["DESC"]}
    ]


def test_classes_are_counted_in_every_split() -> None:
    findings = check_splits(
        splits_of(train=[("one", "b"), ("two", "b")], test=[("three", "a"), ("four", "b")])
    )
    assert findings["rows"] == {"train": 2, "test": 2}
    assert findings["classes"] == {"train": {"a": 0, "b": 2}, "test": {"a": 1, "b": 1}}
    assert list(findings["overlap"]) == ["test"]


def test_the_largest_class_is_compared_with_the_smallest_that_has_rows() -> None:
    balance = weigh_classes({"a": 60, "b": 4, "c": 0, "d": 10})
    assert balance == {"largest": "a", "smallest": "b", "ratio": 15.0, "rare": {"b": 4, "c": 0}}


def test_lengths_and_what_is_cut() -> None:
    found = measure_lengths(np.arange(1, 101), max_length=90)
    assert found == {
        "mean": 50.5,
        "p50": 50.5,
        "p95": pytest.approx(95.05),
        "p99": pytest.approx(99.01),
        "max": 100,
        "cut_rows": 10,
        "cut_share": 0.1,
    }


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "suggested"),
    [
        ([13, 22, 41], 512, 48),
        ([13, 22, 48], 512, 48),
        ([20] * 1000 + [39], 512, 40),
        ([20] * 1000 + [400], 512, 24),
        ([700] * 10, 512, 512),
    ],
)
def test_the_suggested_length_cuts_nothing_but_a_long_tail(
    lengths: list[int], max_tokens: int, suggested: int
) -> None:
    assert suggest_max_length(np.array(lengths), max_tokens=max_tokens) == suggested


def remedies(splits: DatasetDict, *, max_length: int = 8, longest: int = 8) -> list[str]:
    tokens = np.array([longest])
    lengths = {
        "max_length": max_length,
        "suggested_max_length": suggest_max_length(tokens, max_tokens=512),
        "splits": {"train": measure_lengths(tokens, max_length=max_length)},
    }
    return [change["remedy"] for change in suggest_changes(check_splits(splits), lengths=lengths)]


def even_rows(count: int = 10) -> list[tuple[str, str]]:
    return [(f"text {number}", "ab"[number % 2]) for number in range(2 * count)]


def test_nothing_is_suggested_for_data_without_oddities() -> None:
    assert remedies(splits_of(train=even_rows(), test=[("another text", "a")])) == []


def test_strong_imbalance_suggests_class_weights() -> None:
    few = [(f"more {number}", "c") for number in range(10)]
    assert remedies(splits_of(train=even_rows(90) + few)) == []
    assert remedies(splits_of(train=even_rows(100) + few)) == ["--class-weights balanced"]


def test_cut_texts_suggest_a_length() -> None:
    splits = splits_of(train=even_rows())
    assert remedies(splits, max_length=16, longest=20) == ["--max-length 24"]
    assert remedies(splits, max_length=24, longest=20) == []


@pytest.mark.parametrize(
    ("train", "test", "remedy"),
    [
        ([*even_rows(), ("text 0", "b")], [], "decide on one label"),
        ([*even_rows(), ("no", "b")], [], "look whether"),
        (even_rows(), [("text 0", "b")], "take them out of train"),
        ([*even_rows(), ("more 1", "c"), ("more 2", "c")], [], "bring more rows"),
    ],
)
def test_each_oddity_has_its_remedy(
    train: list[tuple[str, str]], test: list[tuple[str, str]], remedy: str
) -> None:
    splits = splits_of(train=train, test=[("another text", "a"), *test])
    [found] = remedies(splits)
    assert found.startswith(remedy)


def test_without_lengths_the_rest_is_suggested() -> None:
    findings = check_splits(splits_of(train=[*even_rows(), ("text 0", "b")]))
    assert len(suggest_changes(findings, lengths=None)) == 1
