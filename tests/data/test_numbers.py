"""Numbers as tables format_label them."""

from pathlib import Path

import pyarrow
import pytest

from finetune.config.schema import DataConfig
from finetune.data.formats import read_file
from finetune.data.numbers import plain_numbers
from finetune.events import Event, Info


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        (["4,5", "-1", "", "0,25"], ["4.5", "-1", "", "0.25"]),
        (["4,5", "1,2,3"], ["4,5", "1,2,3"]),
        (["4,5", "good"], ["4,5", "good"]),
        (["1", "NaN", " n/a", "2.5"], ["1", "", "", "2.5"]),
        (["4,5"] * 9 + ["NaN", "k.A."], ["4.5"] * 9 + ["NaN", "k.A."]),
        (["4,5"] * 10 + ["1,2,3"], ["4,5"] * 10 + ["1,2,3"]),
        (["good", "NaN"], ["good", "NaN"]),
        (["none", "none"], ["none", "none"]),
    ],
)
def test_numbers_are_spelled_in_one_way_and_words_stay(values: list[str], plain: list[str]) -> None:
    table = pyarrow.table({"score": values})
    found = plain_numbers(table, allows_comma=True, path=Path("a.csv"), emit=lambda event: None)
    assert found["score"].to_pylist() == plain


@pytest.mark.parametrize(
    ("delimiter", "task", "score"),
    [(";", "auto", "4.5"), (";", "multi", "4,5"), ("\t", "auto", "4,5")],
)
def test_a_comma_is_decimal_where_columns_are_delimited_by_semicolons(
    tmp_path: Path, delimiter: str, task: str, score: str
) -> None:
    path = tmp_path / "hotel.csv"
    path.write_text(f"text{delimiter}score\ngood, really{delimiter}4,5\nbad{delimiter}1\n")
    emitted: list[Event] = []
    table = read_file(path, DataConfig("", task=task), emit=emitted.append)
    assert table.columns["score"].to_pylist() == [score, "1"]
    lines = " ".join(event.message for event in emitted if isinstance(event, Info))
    assert ("commas are read as decimal" in lines) == (score == "4.5")
