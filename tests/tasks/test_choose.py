"""The task type of a label column."""

import re
from itertools import combinations

import pytest

from finetune.errors import DataError, UsageError
from finetune.tasks.choose import choose_task_type

SCORES = [str(number / 10) for number in range(23)]


@pytest.mark.parametrize(
    ("labels", "task", "reason"),
    [
        (SCORES, "regression", "23 numbers, 0 to 2.2"),
        (["0", "15", "0,15", "15,3", "3"], "multi", "','"),
        (["joy", "joy|fear", "fear|anger"], "multi", "'|'"),
        ([f"{a},{b},{c}" for a, b, c in combinations(range(7), 3)], "multi", "','"),
        ([f"{day:02}.03.2026" for day in range(1, 31)], "single", "30 different"),
        (["['a']", "['a', 'b']", "a"], "multi", "several labels"),
        (["[other]", "praise", "question"], "single", "3 different"),
        (["1", "2", "3", "4", "5"], "single", "--task regression predicts a number"),
        ([str(number) for number in range(101)], "single", "101 numbers"),
        ([*SCORES, *map("class {}".format, range(5))], "single", "28 different"),
        ([*map(str, range(30)), "none"], "single", "30 numbers"),
        (["Food, drinks", "Arts, crafts", "Travel"], "single", ""),
        (["C/C++", "Java", "C", "I/O", "TCP/IP", "UDP/IP"], "single", ""),
        (["New York", "New Delhi", "New"], "single", ""),
        (["price", "team", "price / team"], "multi", "'/' between them; --task single treats"),
        (["price", "team", "food", "price + team", "team + food"], "multi", "'+'"),
        (["#price #team", "#price", "#team"], "multi", "'#'"),
        (["{price,team}", "{price}", "{team}", "{}"], "multi", "several labels"),
        (["price und team", "price", "team", "food", "food und team"], "multi", "'und'"),
        (["food sport", "food", "sport", "sport art", "art"], "multi", "' '"),
        (["['food']", "['sport']"], "single", "each row has one label"),
        (["12,5", "98,10", "7", "15,25"], "single", "the commas are decimal"),
        ([score.replace(".", ",") for score in SCORES], "regression", "the commas are decimal"),
        (
            [*(score.replace(".", ",") for score in SCORES), "NA"],
            "regression",
            "the commas are decimal",
        ),
        (["yes; no", "no"], "single", ""),
    ],
)
def test_task_type_of_a_column_is_detected_with_a_reason(
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
        ([f"{number},{number}" for number in range(10, 40)] + ["7.5"], "'10,10'"),
        ([f"{number}.5 %" for number in range(30)], "'0.5 %'"),
    ],
)
def test_ambiguous_number_formats_are_rejected(labels: list[str], wrong: str) -> None:
    with pytest.raises(DataError, match=re.escape(wrong)) as raised:
        choose_task_type("auto", labels, names=None)
    assert "--task single" in raised.value.remedy
    assert choose_task_type("single", labels, names=None)[0].name == "single"


@pytest.mark.parametrize(
    ("numbers", "rows", "task"),
    [
        ([*range(17), *range(18, 27)], 260, "single"),
        ([*range(1990, 2010), 2015, 2024], 100, "single"),
        ([*range(100, 4000, 100)], 400, "single"),
        ([*range(100, 4000, 100)], 50, "regression"),
        ([*(number / 2 for number in range(60))], 600, "regression"),
    ],
)
def test_repeated_integers_are_classes(numbers: list[float], rows: int, task: str) -> None:
    found, _ = choose_task_type("auto", map(str, numbers), names=None, rows=rows)
    assert found.name == task


def test_task_option_is_used_and_unknown_task_types_are_rejected() -> None:
    assert choose_task_type("regression", ["1", "2"], names=None)[0].name == "regression"
    with pytest.raises(UsageError, match="unknown --task 'multiple'") as raised:
        choose_task_type("multiple", ["1", "2"], names=None)
    assert "auto, " in raised.value.remedy
