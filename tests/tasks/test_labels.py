"""The labels of a table."""

import pytest

from finetune.errors import DataError
from finetune.tasks.labels import name_classes, refuse_other_tasks, sort_classes


def test_numbers_of_the_same_value_are_one_class() -> None:
    labels = ["0.20", "0.2", "0.200", "3", "3.0", " 3.00", "007", "1e1", "10", "-1.0", "v3.0", ""]
    assert name_classes(labels) == {
        **dict.fromkeys(labels[:3], "0.2"),
        **dict.fromkeys(labels[3:6], "3"),
        **{"007": "007", "1e1": "10", "10": "10", "-1.0": "-1", "v3.0": "v3.0", "": ""},
    }


def test_numbers_go_before_words() -> None:
    assert sort_classes(["b", "-2", "10", "9", "1e1", "A"]) == ["-2", "9", "10", "1e1", "A", "b"]


SCORES = [str(number / 10) for number in range(23)]


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (SCORES, "scores, 23 numbers such as 0.1"),
        (["0", "15", "0,15", "15,3", "3"], "several labels in a row, such as '0,15'"),
        (["joy", "joy|fear", "fear|anger"], "several labels in a row, such as 'fear|anger'"),
        (["['a']", "['a', 'b']", "['b', 'c']", "a", "b"], "several labels"),
    ],
)
def test_other_tasks_than_classification_are_refused_with_the_reason(
    labels: list[str], reason: str
) -> None:
    with pytest.raises(DataError, match="not supported") as raised:
        refuse_other_tasks(labels, column="label", table="rows.csv")
    assert reason in raised.value.message


@pytest.mark.parametrize(
    "labels",
    [
        SCORES[:21],
        [str(number) for number in range(101)],
        [*SCORES, "none"],
        [f"1e{number}99999999" for number in range(30)],
        ["Food, drinks", "Arts, crafts", "Travel"],
        ["a,b", "a", "b"],
        ["yes; no", "no"],
    ],
)
def test_ratings_and_names_with_separators_are_classes(labels: list[str]) -> None:
    refuse_other_tasks(labels, column="label", table="rows.csv")
