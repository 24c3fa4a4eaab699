"""The task type of a column of labels."""

import re

import pytest

from finetune.errors import DataError, UsageError
from finetune.tasks.choose import choose_task_type

SCORES = [str(number / 10) for number in range(23)]


@pytest.mark.parametrize(
    ("labels", "task", "reason"),
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
def test_the_task_type_of_a_column_is_found_with_the_reason(
    labels: list[str], task: str, reason: str
) -> None:
    found, why = choose_task_type("auto", labels, names=None)
    assert found.name == task
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


def test_a_named_task_type_is_used_and_an_unknown_one_refused() -> None:
    assert choose_task_type("regression", ["1", "2"], names=None)[0].name == "regression"
    with pytest.raises(UsageError, match="no --task 'multiple'") as raised:
        choose_task_type("multiple", ["1", "2"], names=None)
    assert "auto, " in raised.value.remedy
