from finetune.tasks.figures import plain
from finetune.tasks.regression import Regression


def test_numbers_are_as_short_as_they_read_well() -> None:
    assert [plain(one) for one in (0.00005, 0.25, 1500.0, 2e6)] == [
        *("5e-05", "0.25", "1,500", "2,000,000")
    ]


def test_large_numbers_are_written_out_in_the_largest_errors() -> None:
    rows = [{"text": "a house", "label": 250_000.0, "predicted": 12_345.6}]
    assert Regression().mistakes(rows).rows == [("a house", "250,000", "12,346", "-237,654")]
