"""The labels of a table."""

import re

import pytest

from finetune.errors import DataError, UsageError
from finetune.tasks.choose import choose_task_type
from finetune.tasks.labels import listed_counts, name_classes, sort_classes, split_labels


def test_numbers_of_the_same_value_are_one_class() -> None:
    labels = ["0.20", "0.2", "0.200", "3", "3.0", " 3.00", "007", "1e1", "10", "-1.0", "v3.0", ""]
    assert name_classes(labels) == {
        **dict.fromkeys(labels[:3], "0.2"),
        **dict.fromkeys(labels[3:6], "3"),
        **{"007": "007", "1e1": "10", "10": "10", "-1.0": "-1", "v3.0": "v3.0", "": ""},
    }


def test_a_key_that_looks_like_a_number_beyond_all_bounds_is_a_class_of_its_own() -> None:
    keys = ["7e12345678901234567890", "7e-12345678901234567890", "2e999999999"]
    assert name_classes(keys) == dict(zip(keys, keys, strict=True))


def test_what_stands_unseen_beside_a_class_is_no_part_of_it() -> None:
    assert set(name_classes(["yes", "yes\u200b", "\ufeffyes", "\u00a0yes "]).values()) == {"yes"}
    assert name_classes(["\u200b"]) == {"\u200b": ""}


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
        (["[a]", "[a, b]"], "multi", "lists"),
        (["[other]", "praise", "question"], "single", "3 different"),
        (["1", "2", "3", "4", "5"], "single", "--task regression takes them for a number"),
        (SCORES[:21], "single", "21 numbers"),
        ([str(number) for number in range(101)], "single", "101 numbers"),
        ([*SCORES, *map("class {}".format, range(5))], "single", "28 different"),
        ([*map(str, range(30)), "none"], "single", "31 different"),
        ([*map("{}%".format, range(20))], "single", "20 different"),
        ([f"1e{number}99999999" for number in range(30)], "single", ""),
        (["Food, drinks", "Arts, crafts", "Travel"], "single", ""),
        (["a,b", "a", "b"], "single", ""),
        (["yes; no", "no"], "single", ""),
    ],
)
def test_the_kind_of_a_column_is_found_with_the_reason(
    labels: list[str], kind: str, reason: str
) -> None:
    found, why = choose_task_type("auto", labels, names=None)
    assert found.name == kind
    assert reason in why


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        ([*SCORES, "inf", "-inf"], "'-inf', 'inf'"),
        ([*SCORES, "-"], "'-'"),
        ([f"{number:,}" for number in range(900, 9000, 90)], "'1,080'"),
        ([f"{number:,}".replace(",", "\u202f") + ",50" for number in range(1000, 9000, 90)], "50'"),
        ([f"${number}.20" for number in range(30)], "'$0.20'"),
        ([f"{number}.5 %" for number in range(30)], "'0.5 %'"),
    ],
)
def test_numbers_that_are_not_written_as_such_are_no_classes(labels: list[str], wrong: str) -> None:
    with pytest.raises(DataError, match=re.escape(wrong)) as raised:
        choose_task_type("auto", labels, names=None)
    assert "--task single" in raised.value.remedy
    assert choose_task_type("single", labels, names=None)[0].name == "single"


def test_of_many_labels_the_first_are_listed() -> None:
    found = listed_counts(dict.fromkeys(map(str, range(30)), 1))
    assert found.startswith("'0' (1), '1' (1), ")
    assert found.endswith("'19' (1) and 10 others")


def test_a_kind_that_is_named_is_taken_and_one_that_is_unknown_refused() -> None:
    assert choose_task_type("regression", ["1", "2"], names=None)[0].name == "regression"
    with pytest.raises(UsageError, match="no --task 'multiple'") as raised:
        choose_task_type("multiple", ["1", "2"], names=None)
    assert "auto, " in raised.value.remedy
