import pytest
from scipy.stats import binomtest

from finetune.tasks.intervals import format_interval, wilson_interval


@pytest.mark.parametrize(("right", "rows"), [(0, 10), (19, 19), (95, 100)])
def test_the_interval_is_that_of_scipy(right: int, rows: int) -> None:
    expected = binomtest(right, rows).proportion_ci(0.95, method="wilson")

    assert wilson_interval(right, rows) == pytest.approx(expected, abs=1e-7)


def test_without_rows_there_is_no_interval() -> None:
    assert format_interval(0.0, 0) == "–"
    assert format_interval(0.95, 100) == "88.8–97.8%"


def test_no_right_answer_gives_an_interval_from_zero_on() -> None:
    assert format_interval(0.0, 9) == "0.0–29.9%"
