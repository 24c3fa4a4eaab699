from finetune.tasks.regression import Regression
from finetune.tasks.tables import format_interval, format_number


def test_numbers_are_short() -> None:
    numbers = [format_number(one) for one in (0.00005, 0.25, 1500.0, 2e6)]
    assert numbers == ["5e-05", "0.25", "1,500", "2,000,000"]


def test_large_numbers_are_written_out_in_the_largest_errors() -> None:
    rows = [{"text": "a house", "label": 250_000.0, "predicted": 12_345.6}]
    assert Regression().mistakes(rows).rows == [("a house", "250,000", "12,346", "-237,654")]


def test_the_interval_of_a_fraction_is_in_percent() -> None:
    assert format_interval(0.95, 100) == "88.8–97.8%"
    assert format_interval(0.0, 9) == "0.0–29.9%"
    assert format_interval(0.0, 0) == "–"
