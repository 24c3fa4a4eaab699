"""Duplicate detection, and rows held out for validation and test."""

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pyarrow
import pytest
from data_files import messages
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config.schema import DataConfig
from finetune.data.dataset import (
    find_held_out,
    make_dataset,
    mark_near_duplicates,
    number_texts,
    split_table,
)
from finetune.data.dataset import texts_of as columns_of
from finetune.errors import DataError
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

CLASSES = ("many", "some", "few")
TASK = Single(CLASSES)


def splitting(
    validation: float | None, test: float, seed: int = 0, rows: int | None = None, *, data: str = ""
) -> DataConfig:
    return DataConfig(
        data,
        validation_fraction=validation,
        test_fraction=test,
        split_seed=seed,
        max_train_samples=rows,
    )


def table_of(texts: list[str], labels: list[str]) -> pyarrow.Table:
    return make_dataset(texts, labels, task=TASK)


def numbered_table(*, many: int, some: int, few: int) -> pyarrow.Table:
    """Return a table of distinct texts in which the classes alternate."""
    rows = [
        (f"{label} {number}", label)
        for label, count in zip(CLASSES, (many, some, few), strict=True)
        for number in range(count)
    ]
    rows.sort(key=lambda row: int(row[0].split()[1]))
    return table_of([text for text, _ in rows], [label for _, label in rows])


def texts_of(table: pyarrow.Table) -> list[str]:
    return table["text"].to_pylist()


def counts_of(table: pyarrow.Table) -> Counter[str]:
    return Counter(CLASSES[label] for label in table["label"].to_pylist())


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.sampled_from("aAbBcdefgh"), st.sampled_from(CLASSES)), min_size=1),
    fraction=st.floats(0.0, 1.0),
    seed=st.integers(0, 9),
)
def test_splits_never_share_texts_and_training_keeps_all_classes(
    rows: list[tuple[str, str]], fraction: float, seed: int
) -> None:
    table = table_of([text for text, _ in rows], [label for _, label in rows])
    numbers = number_texts(*columns_of(table))
    strata = TASK.strata(TASK.labels(table["label"]))
    drawn = np.random.default_rng(seed).integers(1000, size=len(rows)).astype(np.uint64)
    mask = find_held_out(numbers, strata, drawn, fraction=fraction)
    kept, held_out = table.filter(~mask), table.filter(mask)
    assert len(kept) + len(held_out) == len(rows)
    sides = [{text.casefold() for text in texts_of(side)} for side in (kept, held_out)]
    assert sides[0].isdisjoint(sides[1])
    first_labels = {text.casefold(): label for text, label in reversed(rows)}
    assert set(first_labels.values()) <= {first_labels[text] for text in sides[0]}


def test_small_table_changes_keep_most_of_the_test_split() -> None:
    table = numbered_table(many=600, some=300, few=100)
    rows = [
        *zip(texts_of(table), (CLASSES[label] for label in table["label"].to_pylist()), strict=True)
    ]
    relabeled = [(text, "some" if text.endswith("7") else label) for text, label in rows]
    changed = {
        "in another order": (rows[::-1], 100),
        "with other spaces": ([(f" {text.upper()}", label) for text, label in rows], 100),
        "relabeled": (relabeled, 85),
        "without a class": ([row for row in rows if row[1] != "some"], 65),
        "with more rows": (rows + [(f"new {number}", "many") for number in range(100)], 95),
    }

    def test_split(rows: list[tuple[str, str]], seed: int = 0) -> set[str]:
        tables = {"train": table_of(*map(list, zip(*rows, strict=True)))}
        split = split_table(tables, splitting(0.0, 0.1, seed), task=TASK)["test"]
        return {text.strip().lower() for text in texts_of(split)}

    before = test_split(rows)
    assert len(before) == 100
    for how, (after, shared) in changed.items():
        assert len(before & test_split(after)) >= shared, how
    assert len(before & test_split(rows, seed=1)) < 30


@pytest.mark.parametrize(
    ("text", "is_near"),
    [
        ("Order 815 of 1.5.2024 hasn't arrived!", True),
        ("order A-17/4 of Monday hasn't arrived", False),
        ("order A-17/4 of hasn't arrived", True),
        ("ORDER no@one.org of 12:30 — hasn\u2019t   arrived…", True),
        ("orders 12 of 4 hasn't arrived", False),
        ("заказ №99 не пришёл", True),
        ("订单７没有到", True),
        ("99 - 12", False),
        ("", False),
    ],
)
def test_near_duplicates_differ_only_in_numbers_and_punctuation(text: str, is_near: bool) -> None:
    known = ["order 12 of 3 hasn't arrived", "заказ 1 не пришёл", "订单12没有到", "12:30", "🙂"]
    train, rows = table_of(known, ["many"] * 5), table_of([text], ["many"])
    assert mark_near_duplicates(rows, train).tolist() == [is_near]


def test_existing_splits_are_unchanged_and_shared_texts_are_counted() -> None:
    given_splits = {
        "train": numbered_table(many=20, some=10, few=10),
        "validation": table_of(["another"], ["few"]),
        "test": table_of(["few 7", "Many  3", "new"], ["few", "some", "many"]),
    }
    with messages() as said:
        splits = split_table(given_splits, splitting(0.5, 0.5), task=TASK)
    assert list(splits) == ["train", "validation", "test"]
    assert all(texts_of(splits[name]) == texts_of(given_splits[name]) for name in splits)
    [warning] = said
    assert warning.startswith("2 of the 3 test rows have a text that is also in train")


def test_texts_with_contradictory_labels_are_counted() -> None:
    texts = [*map(str, range(30)), "a", "A ", "b", "b"]
    table = table_of(texts, [*["many", "some"] * 15, "many", "some", "few", "few"])
    with messages() as said:
        split_table({"train": table}, splitting(0.1, 0.2), task=TASK)
    assert "1 texts have contradictory labels" in said


def test_missing_test_split_is_held_out_and_reported() -> None:
    table = numbered_table(many=60, some=30, few=10)
    whole = {"train": table}
    with messages() as said:
        splits = split_table(whole, splitting(0.1, 0.2), task=TASK)
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 70,
        "validation": 10,
        "test": 20,
    }
    assert {*chain(*map(texts_of, splits.values()))} == {*texts_of(table)}
    assert said == ["no test file: holding out a random 20% as the test split, 20 of 100 rows"]


@pytest.mark.parametrize(
    ("rows", "task", "held_out"),
    [(999, TASK, 0), (1000, TASK, 100), (999, Regression(), 0), (100, Multi(CLASSES), 10)],
)
def test_default_validation_split_requires_enough_rows(
    rows: int, task: Task, held_out: int
) -> None:
    texts = [f"text {number}" for number in range(rows)]
    labels: dict[str, list[Any]] = {
        "single": [CLASSES[number % 3] for number in range(rows)],
        "regression": list(map(float, range(rows))),
        "multi": [[CLASSES[number % 3]] for number in range(rows)],
    }
    table = make_dataset(texts, pyarrow.chunked_array([labels[task.name]]), task=task)
    given = {"train": table, "test": table.slice(0, 3)}
    with messages() as said:
        for fraction, expected in ((None, held_out), (0.1, round(rows / 10)), (0.0, 0)):
            splits = split_table(given, splitting(fraction, 0.1), task=task)
            assert len(splits.get("validation", ())) == expected
    hints = [message for message in said if "--validation-fraction 0.1" in message]
    assert len(hints) == (held_out == 0)


def test_tiny_classes_are_not_held_out_by_default() -> None:
    names = [f"class {number}" for number in range(600)]
    texts, task = [f"text {number}" for number in range(1200)], Single(names)
    given = {"train": make_dataset(texts, names * 2, task=task)}
    splits = split_table(given, splitting(None, 0.5), task=task)
    assert {name: len(split) for name, split in splits.items()} == {"train": 600, "test": 600}
    with pytest.raises(DataError, match="validation split"):
        split_table(given, splitting(0.1, 0.5), task=task)


@pytest.mark.parametrize(("rows", "fraction"), [(1, 0.1), (0, 0.1), (2, 0.05), (10, 0.95)])
def test_too_few_rows_to_split_raise_an_error_with_a_remedy(rows: int, fraction: float) -> None:
    table = {"train": numbered_table(many=rows, some=rows, few=0)}
    with pytest.raises(DataError, match="too few rows") as raised:
        split_table(table, splitting(fraction, 0.1), task=TASK)
    assert TASK.label_summary in raised.value.message
    purpose = "validation" if "validation" in raised.value.message else "test"
    assert f"--{purpose}-fraction" in raised.value.remedy
    assert ("0 for none" in raised.value.remedy) == (purpose == "validation")


def limited(
    table: pyarrow.Table, rows: int, *, data: str = "a.csv", seed: int = 0
) -> pyarrow.Table:
    options = splitting(0.0, 0.1, seed, rows, data=data)
    given = {"train": table, "test": table_of(["x", "y", "z"], [*CLASSES])}
    return split_table(given, options, task=TASK)["train"]


def test_row_limit_keeps_class_proportions_of_a_sorted_table() -> None:
    table = table_of([str(n) for n in range(100)], ["many"] * 70 + ["some"] * 25 + ["few"] * 5)
    assert counts_of(limited(table, 20)) == {"many": 14, "some": 5, "few": 1}
    assert counts_of(limited(table, 3)) == {"many": 1, "some": 1, "few": 1}
    assert texts_of(limited(table, 100)) == texts_of(limited(table, 1000)) == texts_of(table)
    positions = [int(text) for text in texts_of(limited(table, 20))]
    assert positions == sorted(positions)
    assert positions != [int(text) for text in texts_of(limited(table, 20, seed=1))]


def test_training_rows_with_only_one_class_are_rejected() -> None:
    table = table_of([str(n) for n in range(9)], ["many"] * 7 + ["some"] * 2)
    with pytest.raises(DataError, match="all 7 training rows have the label 'many'") as raised:
        limited(table, 7, data="trec")
    assert "--max-train-samples" in raised.value.remedy


def test_sentence_pairs_share_a_number_if_both_texts_are_equal() -> None:
    texts = pyarrow.chunked_array([["a", "b", "A "], ["a", "b", "a"]])
    pairs = pyarrow.chunked_array([["x", "x", "X", "y"], ["x", "x"]])
    assert number_texts(texts, pairs).tolist() == [0, 1, 0, 2, 1, 0]


@given(st.lists(st.text(st.sampled_from("aAbB ßẞsS\u03c2\u03a3\tİ\u2003"), max_size=4), min_size=1))
def test_texts_share_a_number_if_their_normal_forms_are_equal(texts: list[str]) -> None:
    numbers = number_texts(pyarrow.chunked_array([texts])).tolist()
    forms = [" ".join(text.casefold().split()) for text in texts]
    assert numbers == [list(dict.fromkeys(forms)).index(form) for form in forms]
