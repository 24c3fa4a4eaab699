"""Parsing of labels and class names."""

import math
from typing import Any

import pytest

from finetune.errors import DataError
from finetune.tasks.labels import name_classes, sort_classes, split_labels, values_of_classes


def test_integers_with_and_without_decimals_are_one_class() -> None:
    labels = ["3", "3.0", " 3.00", "0.2", "007", "-1.0", "v3.0", ""]
    assert [*name_classes(labels).values()] == ["3", "3", "3", "0.2", "007", "-1", "v3.0", ""]


def test_invisible_characters_around_class_names_are_removed() -> None:
    assert set(name_classes(["yes", "yes\u200b", "\ufeffyes", "\u00a0yes "]).values()) == {"yes"}
    assert name_classes(["\u200b"]) == {"\u200b": ""}


def test_numbers_are_sorted_before_words() -> None:
    assert sort_classes(["b", "-2", "10", "9", "1e1", "A"]) == ["-2", "9", "10", "1e1", "A", "b"]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("['Food, drinks', \"it's\"]", ["Food, drinks", "it's"]),
        ('["a", null, "", true, 3]', ["a", "True", "3"]),
        ("['a', None]", ["a"]),
        ("[a, b c]", ["a", "b c"]),
        ("[]", []),
        ("[" * 10_000 + "]" * 10_000, ["[" * 9_999 + "]" * 9_999]),
        ("['food' 'sport']", ["food", "sport"]),
        ("['food'\n 'sport']", ["food", "sport"]),
        ("{'food', 'sport'}", ["food", "sport"]),
        ("('food', 'sport')", ["food", "sport"]),
        ("('food',)", ["food"]),
        ("()", []),
        ("{}", []),
        ("{'a': 1, 'b': 0, 'c': True}", ["a", "c"]),
        ("{price,team}", ["price", "team"]),
        ("[1 0 1]", ["1", "0", "1"]),
        ("[3, 7]", ["3", "7"]),
        ("[nan]", ["nan"]),
        ("(other)", ["(other)"]),
        ("Salt (fine)", ["Salt (fine)"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_list_notations_are_parsed(text: str, labels: list[str]) -> None:
    assert split_labels(text, None) == labels


@pytest.mark.parametrize(
    "text", ["{'a': 0.7, 'b': 0.3}", "[['a'], ['b']]", "{'start': 0, 'label': 'a'}"]
)
def test_unsupported_lists_are_rejected(text: str) -> None:
    with pytest.raises(DataError, match="the label") as raised:
        split_labels(text, None)
    assert '["a", "b"]' in raised.value.remedy


@pytest.mark.parametrize(
    ("names", "column", "values"),
    [
        (["1", "2"], [1, 1, None], [1, 2]),
        (["1", "2.5"], [1.0, math.nan], [1.0, 2.5]),
        (["1", "2.5"], [1, 2.5], [1, 2.5]),
        (["1", "2"], ["1.0", ""], ["1.0", "2.0"]),
        (["false", "true"], [True, None], [False, True]),
        (["1", "2"], [[1, 2], []], [1, 2]),
        (["1", "2"], ["1", "2"], None),
        (["1", "x"], [1, 2], None),
        (["1", "2"], [1, "x"], None),
        (["1", "2"], [None], None),
    ],
)
def test_class_values_have_the_type_of_the_label_column(
    names: list[str], column: list[Any], values: list[Any] | None
) -> None:
    typed = values_of_classes(names, column)
    assert [*typed.values()] == (values or [])
    assert [*map(type, typed.values())] == [*map(type, values or [])]
