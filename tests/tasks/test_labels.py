"""The labels of a table."""

import pytest

from finetune.errors import UsageError
from finetune.tasks.choose import choose_kind
from finetune.tasks.labels import name_classes, sort_classes, split_labels


def test_numbers_of_the_same_value_are_one_class() -> None:
    labels = ["0.20", "0.2", "0.200", "3", "3.0", " 3.00", "007", "1e1", "10", "-1.0", "v3.0", ""]
    assert name_classes(labels) == {
        **dict.fromkeys(labels[:3], "0.2"),
        **dict.fromkeys(labels[3:6], "3"),
        **{"007": "007", "1e1": "10", "10": "10", "-1.0": "-1", "v3.0": "v3.0", "": ""},
    }


def test_numbers_go_before_words() -> None:
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
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_list_is_read_as_whoever_wrote_it_meant(text: str, labels: list[str]) -> None:
    assert split_labels(text, None) == labels


SCORES = [str(number / 10) for number in range(23)]


@pytest.mark.parametrize(
    ("labels", "kind", "reason"),
    [
        (SCORES, "regression", "23 numbers, 0 to 2.2"),
        ([*SCORES, ".15", "-.5"], "regression", "25 numbers, -0.5 to 2.2"),
        (["0", "15", "0,15", "15,3", "3"], "multi", "','"),
        (["joy", "joy|fear", "fear|anger"], "multi", "'|'"),
        (["['a']", "['a', 'b']", "a"], "multi", "lists"),
        (["1", "2", "3", "4", "5"], "single", "--task regression takes them for a number"),
        (SCORES[:21], "single", "21 numbers"),
        ([str(number) for number in range(101)], "single", "101 numbers"),
        ([*SCORES, "none"], "single", "24 different"),
        ([f"1e{number}99999999" for number in range(30)], "single", ""),
        (["Food, drinks", "Arts, crafts", "Travel"], "single", ""),
        (["a,b", "a", "b"], "single", ""),
        (["yes; no", "no"], "single", ""),
    ],
)
def test_the_kind_of_a_column_is_found_with_the_reason(
    labels: list[str], kind: str, reason: str
) -> None:
    found, why = choose_kind("auto", labels, names=None)
    assert found.name == kind
    assert reason in why


def test_a_kind_that_is_named_is_taken_and_one_that_is_unknown_refused() -> None:
    assert choose_kind("regression", ["1", "2"], names=None)[0].name == "regression"
    with pytest.raises(UsageError, match="no --task 'multiple'") as raised:
        choose_kind("multiple", ["1", "2"], names=None)
    assert "auto, " in raised.value.remedy
