"""Rows before it is known what their columns mean."""

from pathlib import Path

import pytest

from finetune.data.raw import RawTable, as_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("NA", "NA"),
        ("3.0", "3.0"),
        (3, "3"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (True, "true"),
        (None, ""),
        (float("nan"), ""),
        (float("inf"), "inf"),
    ],
)
def test_every_value_becomes_text(value: str | float | None, text: str) -> None:
    assert as_text(value) == text


def test_a_row_knows_its_place_in_the_file() -> None:
    table = RawTable(Path("a.csv"), {"text": ["x", "y"]}, unit="line", numbers=[2, 5])
    assert table.place(1) == "line 5 of a.csv"
