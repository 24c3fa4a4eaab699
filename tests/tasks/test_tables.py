import pytest

from finetune.tasks.regression import Regression
from finetune.tasks.tables import duration, format_value


def test_large_numbers_are_written_out_in_the_largest_errors() -> None:
    rows = [{"text": "a house", "label": 250_000.0, "predicted": 12_345.6}]
    assert Regression().mistakes(rows).rows == [("a house", "250,000", "12,346", "237,654")]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (1234.5678, "1,235"),
        (5e-5, "5e-05"),
        ({"a": 1000, "b": "c"}, "a: 1,000, b: c"),
        ([True, None], "on, –"),
        ([], "none"),
    ],
)
def test_values_are_shown_as_people_read_them(value: object, shown: str) -> None:
    assert format_value(value) == shown


def test_durations_have_the_units_that_matter() -> None:
    shown = [duration(seconds) for seconds in (0.04, 9.53, 9.96, 59.6, 1453, 8040)]
    assert shown == ["0.0 s", "9.5 s", "10 s", "1 min 0 s", "24 min 13 s", "2 h 14 min"]
