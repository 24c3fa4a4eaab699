"""Tables to which predictions are added."""

import json
import math
from pathlib import Path

import pyarrow
import pytest
from data_files import add_predictions, messages
from pyarrow import parquet

from finetune.data.columns import OtherData
from finetune.data.read import read_source
from finetune.evaluation.prediction_file import joined
from finetune.tasks.multi import Multi

LABEL = {"label": "HUM;x", "probability": 0.000123456789}


@pytest.mark.parametrize(
    ("content", "expected", "encoding"),
    [
        ("id;text\n1;a b\n", 'id;text;label;probability\n1;a b;"HUM;x";0.000123457\n', "utf-8"),
        # A title, blank lines, trailing blank cells, and a missing final newline.
        ("Tickets of May\n\nid;text\n1;a b\n\n \n2;c\n",
         'Tickets of May\n\nid;text;label;probability\n1;a b;"HUM;x";0.000123457\n\n \n'
         '2;c;"HUM;x";0.000123457\n', "utf-8"),
        ("id;text;price\r\n1;a;98,10\r\n2;c;3;;;",
         'id;text;price;label;probability\r\n1;a;98,10;"HUM;x";0,000123457\r\n'
         '2;c;3;"HUM;x";0,000123457', "utf-8-sig"),
        ("sep=;\nid;text\n1;a b\n", 'sep=;\nid;text;label;probability\n1;a b;"HUM;x";0.000123457\n',
         "utf-16"),
        ('"id";"text"\n"1";"a ""b"""\n',
         '"id";"text";"label";"probability"\n"1";"a ""b""";"HUM;x";"0.000123457"\n', "cp1252"),
        ('id;text\n1;"a\n\n ö"\n007;"c"\n',
         'id;text;label;probability\n1;"a\n\n ö";"HUM;x";0.000123457\n'
         '007;"c";"HUM;x";0.000123457\n', "cp1252"),
        ("id\ttext\n1\ta \"b\n2\t\n",
         "id\ttext\tlabel\tprobability\n1\ta \"b\tHUM;x\t0.000123457\n2\t\tHUM;x\t0.000123457\n",
         "utf-8"),
        # A blank text in a one-column table differs from a blank line.
        ('"text"\n"a b"\n\n""\n"c ""d"""\n',
         '"text","label","probability"\n"a b","HUM;x","0.000123457"\n\n'
         '"","HUM;x","0.000123457"\n"c ""d""","HUM;x","0.000123457"\n', "utf-8"),
        ("Id|Text|Label\n1|a|b\n",
         "Id|Text|Label|predicted_label|probability\n1|a|b|HUM;x|0.000123457\n", "utf-8"),
        ('id,text\n1,"a \\"b\\", c"\n',
         'id,text,label,probability\n1,"a \\"b\\", c",HUM;x,0.000123457\n', "utf-8"),
    ],
)  # fmt: skip
def test_csv_rows_are_unchanged_except_for_added_columns(
    content: str, expected: str, encoding: str, tmp_path: Path
) -> None:
    suffix = "tsv" if "\t" in content else "csv"
    source = tmp_path / f"a.{suffix}"
    source.write_bytes(content.encode(encoding))
    output = add_predictions(source, tmp_path / f"b.{suffix}", LABEL, text_column="text")
    assert output.read_bytes().decode(encoding) == expected


def test_class_name_outside_the_file_encoding_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("id,text\n1,é\n".encode("cp1252"))
    output = add_predictions(tmp_path / "a.csv", tmp_path / "b.csv", {"label": "日本"})
    assert output.read_text(encoding="utf-8-sig").endswith("1,é,日本\n")


def test_texts_too_long_for_excel_are_truncated_and_counted(tmp_path: Path) -> None:
    long, number = "x" * 40_000, 12345678901234567890
    rows = [{"id": number, "text": text, "when": "1850-01-01"} for text in ("a", long, long)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with messages() as said:
        output = add_predictions(tmp_path / "a.json", tmp_path / "b.xlsx", LABEL)
    assert said[-1] == "Excel cells hold 32,767 characters: 2 texts are truncated"
    frame = read_source(output, OtherData()).frame
    assert frame["id"].tolist() == [str(number)] * 3
    assert frame["text"].str.len().tolist() == [1, 32_767, 32_767]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".xlsx", ".parquet"])
def test_nan_and_infinity_become_null_in_json(suffix: str, tmp_path: Path) -> None:
    columns = {
        "text": ["a", "b", "c"],
        "price": [math.nan, math.inf, 1.5],
        "vector": [[1.0, math.nan], [-math.inf], None],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    output = add_predictions(tmp_path / "a.parquet", tmp_path / f"b{suffix}", LABEL)
    if suffix.startswith(".json"):
        rows = output.read_text().strip("[]\n").split(",\n" if suffix == ".json" else "\n")
        values = [json.loads(row, parse_constant=pytest.fail) for row in rows]
        assert [value["price"] for value in values] == [None, None, 1.5]
        assert [value["vector"] for value in values] == [[1.0, None], [None], None]
    elif suffix == ".csv":
        assert output.read_text().splitlines()[1].startswith('a,,"[1.0, null]",HUM')


def test_class_name_with_a_bar_is_read_back() -> None:
    lists = [["a|b"], ["a|b", "c"], ["c", "a"], ["a"], ["c"], []]
    [labels] = Multi.parse([pyarrow.chunked_array([[joined(names) or "[]" for names in lists]])])
    assert labels.to_pylist() == lists
