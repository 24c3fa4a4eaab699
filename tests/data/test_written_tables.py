"""Small tables as spreadsheet programs and users write them."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from data_files import messages

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.load import load_data
from finetune.data.read import Sheet, read_file, read_source
from finetune.data.stream import read_texts
from finetune.errors import DataError, SeveralTablesError

ROWS = 40
TEXT = [f"Das Essen Nummer {n} war {'gut' if n % 2 else 'schlecht'}" for n in range(ROWS)]
PROSE = [f"Also, {text}" if n % 3 else f"{text}; nie wieder" for n, text in enumerate(TEXT)]
LABEL = ["gut" if n % 2 else "schlecht" for n in range(ROWS)]
PRICE = [f"{n + 90},{n % 10}0" for n in range(ROWS)]
DATE = [f"{n % 28 + 1:02}.05.2024 1{n % 10}:30" for n in range(ROWS)]
NUMBER = [n * 1.5 for n in range(ROWS)]
EMPTY = [None] * ROWS


def write(path: Path, rows: Iterable[Any], delimiter: str = ",", **options: Any) -> None:
    """Write rows with a delimiter. Rows that are strings are written unchanged."""
    encoding, end = options.get("encoding", "utf-8"), options.get("end", "\r\n")
    quoting = csv.QUOTE_ALL if options.get("quotes") else csv.QUOTE_MINIMAL
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, delimiter=delimiter, lineterminator=end, quoting=quoting)
    for row in rows:
        lines.write(row) if isinstance(row, str) else writer.writerow(row)
    path.write_bytes(lines.getvalue().encode(encoding))


def table(*columns: Any, names: str) -> list[Any]:
    header = [names.split()] if names else []
    return [*header, *zip(*columns, strict=True)]


GERMAN = table(TEXT, PRICE, LABEL, names="Antwort Preis Urteil")
PLAIN = table(PROSE, LABEL, names="Antwort Urteil")


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("a.csv", GERMAN, {"delimiter": ";"}),
        ("a.csv", GERMAN, {"delimiter": "\t"}),
        ("a.csv", GERMAN, {"delimiter": "|"}),
        ("a.csv", GERMAN, {"delimiter": ";", "quotes": True}),
        ("a.csv", GERMAN, {"delimiter": ";", "end": "\n"}),
        ("a.csv", GERMAN, {"delimiter": ";", "encoding": "utf-8-sig"}),
        ("a.csv", ["Umfrage 2024\n", *GERMAN], {"delimiter": ";"}),
        ("a.csv", ["Umfrage; Mai 2024\n", *GERMAN], {"delimiter": ";"}),
        ("a.csv", ["Umfrage 2024;;\n;;\n", *GERMAN], {"delimiter": ";"}),
        ("a.csv", ["sep=;\r\n", *GERMAN], {"delimiter": ";"}),
        ("a.csv", [*GERMAN, ("Summe", "4380,00", "")], {"delimiter": ";"}),
        ("a.csv", [*GERMAN, ("", "", "")], {"delimiter": ";"}),
        ("a.csv", [(*row, "") for row in GERMAN], {"delimiter": ";"}),
        ("a.csv", table(TEXT, PRICE, PRICE, LABEL, names="Antwort Netto Brutto Urteil"),
         {"delimiter": ";"}),
        ("a.csv", table(TEXT, DATE, LABEL, names="Antwort Datum Urteil"), {"delimiter": ";"}),
        ("a.csv", table(PROSE, PRICE, LABEL, names="Antwort Preis Urteil"), {"delimiter": ";"}),
        ("a.csv", GERMAN, {}),
        ("a.csv", PLAIN, {}),
        ("a.csv", PLAIN, {"delimiter": ";"}),
        ("a.tsv", PLAIN, {"delimiter": "\t"}),
        ("a.txt", PLAIN, {"delimiter": "\t", "encoding": "utf-16"}),
        ("a.csv", ["Umfrage\n\n", *PLAIN], {}),
        ("a.csv", ["Umfrage\n", *PLAIN[:8]], {}),
        ("a.csv", ["# exported, 2024-05-01\n", *table(PROSE, LABEL, names="text label")], {}),
        ("a.csv", ["Survey, May 2024\n", *table(PROSE, LABEL, names="text label")[:7]], {}),
        ("a.csv", table(range(ROWS), PROSE, LABEL, names="#id text label"), {}),
        ("a.csv", [["Dauer", "Q1", "Q1_code"], ["Dauer", "Wie war es?", "Code"],
                   *(['{"ImportId":"x"}'] * 3,), *zip(NUMBER, TEXT, LABEL, strict=True)], {}),
        ("a.csv", table(TEXT, PRICE, LABEL, names=""), {"delimiter": ";"}),
        ("text.xlsx", PLAIN, {}),
        ("text.xls", PLAIN, {"delimiter": "\t"}),
        ("text.parquet", PLAIN, {}),
    ],
)  # fmt: skip
def test_text_and_label_columns_are_found_with_any_delimiter(
    name: str, rows: list[Any], options: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / name, rows, **options)
    loaded = load_data(DataConfig(str(tmp_path / name)))
    assert list(loaded.task.class_names) == ["gut", "schlecht"]
    texts = loaded.splits["train"]["text"].to_pylist()
    assert texts in (TEXT, PROSE, PROSE[:7], PROSE[:6])


# ruff: noqa: RUF001
SENTENCES = {
    "Der Fisch war über Stunden kalt, größer und schön": ("cp1252", "mac_roman", "cp850"),
    "Für uns war es nichts": ("cp1252", "mac_roman"),
    "Win a prize of £1000 or £250": ("cp1252",),
    "Le café était très bon à côté de la gare": ("cp1252", "mac_roman"),
    "El niño comió mañana, ¿qué más?": ("cp1252", "mac_roman"),
    "Byłem zadowolony, świetne jedzenie, wrócę": ("cp1250", "iso8859_2", "mac_latin2"),
    "Příliš žluťoučký kůň úpěl": ("cp1250",),
    "Nagyon jó volt, köszönjük szépen, őszintén": ("cp1250",),
    "Этот фильм мне очень понравился": ("cp1251", "koi8_r", "cp866", "mac_cyrillic"),
    "Товар хороший и пришел быстро": ("cp1251", "koi8_r", "cp866"),
    "Ребёнок доволен, Размер Подошёл": ("cp1251", "koi8_r", "cp866"),
    "Η ταινία ήταν πολύ καλή": ("cp1253",),
    "Çok güzel bir film, teşekkürler, ışık": ("cp1254",),
    "この映画はとても面白かったです": ("cp932", "euc_jp"),
    "料理は美味しい": ("cp932", "euc_jp"),
    "服务态度差": ("gb18030",),
    "這家餐廳的服務非常好": ("big5",),
    "서비스가 최악이었어요": ("cp949",),
    "הסרט היה טוב מאוד": ("cp1255",),
    "كان الفيلم جيدا جدا": ("cp1256",),
    "หนังดีมาก อาหารอร่อย": ("cp874",),
}


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(text, encoding) for text, encodings in SENTENCES.items() for encoding in encodings],
)
def test_encoding_is_detected_from_the_letters(text: str, encoding: str, tmp_path: Path) -> None:
    texts = [f"{text} {n}" for n in range(20)]
    write(tmp_path / "a.csv", table(texts, LABEL[:20], names="text label"), encoding=encoding)
    read = read_file(tmp_path / "a.csv", DataConfig())
    assert read.columns["text"].to_pylist() == texts


def write_sheet(
    path: Path, rows: Iterable[Any], *, merged: Iterable[str] = (), hidden: str | None = None
) -> Path:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    for cells in merged:
        book.active.merge_cells(cells)
    if hidden:
        other = book.create_sheet("Codes")
        other.append(["Code", "Name"])
        other.append([1, "gut"])
        other.sheet_state = hidden
    book.save(path)
    return path


NAMES = ["Antwort", "Urteil", "Preis"]
CELLS = [list(row) for row in zip(PROSE, LABEL, NUMBER, strict=True)]
ONCE = [label if n in (0, 20) else None for n, label in enumerate(["schlecht"] * 20 + ["gut"] * 20)]


@pytest.mark.parametrize(
    ("rows", "options", "first"),
    [
        ([NAMES, *CELLS], {}, 2),
        ([["Umfrage 2024"], NAMES, *CELLS], {}, 3),
        ([["Umfrage 2024"], [], ["Stand: Mai"], NAMES, *CELLS], {"merged": ["A1:C1"]}, 5),
        ([[], [None, "Antwort", None, "Urteil"], *zip(EMPTY, PROSE, EMPTY, LABEL, strict=True)],
         {}, 3),
        ([NAMES, *(row for cells in CELLS for row in (cells, []))], {}, 2),
        ([NAMES, *CELLS, ["Summe", None, 1234.5]], {}, 2),
        ([NAMES, *CELLS, [], [None, "Gesamt:", 1234.5]], {}, 2),
        ([NAMES, *CELLS], {"hidden": "hidden"}, 2),
        ([NAMES, *CELLS], {"hidden": "veryHidden"}, 2),
        ([["Urteil", "Antwort"], *zip(ONCE, PROSE, strict=True)],
         {"merged": ["A2:A21", "A22:A41"]}, 2),
        ([["Befragte", None, "Codierung"], ["Nr", "Antwort", "Urteil"],
          *zip(range(ROWS), PROSE, LABEL, strict=True)], {"merged": ["A1:B1"]}, 3),
    ],
)  # fmt: skip
def test_table_in_a_spreadsheet_is_found(
    rows: list[Any], options: dict[str, Any], first: int, tmp_path: Path
) -> None:
    path = write_sheet(tmp_path / "a.xlsx", rows, **options)
    loaded = load_data(DataConfig(str(path)))
    assert loaded.columns == {"label_column": "Urteil", "text_column": "Antwort"}
    assert list(loaded.task.class_names) == ["gut", "schlecht"]
    assert loaded.splits["train"]["text"].to_pylist() == PROSE
    table = read_file(path, DataConfig())
    assert table.place(table.numbers[0]) == f"row {first} of {path}"


@pytest.mark.parametrize(
    ("rows", "options", "complaint", "remedy"),
    [
        ([NAMES, *CELLS], {"hidden": "visible"}, "holds 2 tables: Sheet, Codes", "--table"),
        ([["Antwort", "Urteil"], *(['="a"&1', label] for label in LABEL)], {}, "formulas whose",
         "save it again"),
        ([["Urteil", "Antwort"], *zip(ONCE, PROSE, strict=True)], {}, "2 of 40 rows", "Blanks"),
        ([], {}, "no sheet of .* has rows", "save it again"),
        ([["Antwort", "Antwort"], *zip(TEXT, LABEL, strict=True)], {}, "duplicate", "rename one"),
    ],
)  # fmt: skip
def test_spreadsheet_problems_are_reported_with_a_remedy(
    rows: list[Any], options: dict[str, Any], complaint: str, remedy: str, tmp_path: Path
) -> None:
    path = write_sheet(tmp_path / "a.xlsx", rows, **options)
    with pytest.raises((DataError, SeveralTablesError), match=complaint) as raised:
        load_data(DataConfig(str(path)))
    assert remedy in raised.value.remedy


def test_unsaved_formulas_in_an_unused_column_are_ignored(tmp_path: Path) -> None:
    names, formulas = ["Antwort", "Zeichen", "Urteil"], [f"=LEN(A{n + 2})" for n in range(ROWS)]
    path = write_sheet(tmp_path / "a.xlsx", [names, *zip(PROSE, formulas, LABEL, strict=True)])
    with messages() as said:
        loaded = load_data(DataConfig(str(path)))
    assert loaded.columns == {"label_column": "Urteil", "text_column": "Antwort"}
    assert any("'Zeichen' (formulas whose values were not saved" in message for message in said)
    options = OtherData(text_column="Zeichen")
    with pytest.raises(DataError, match="'Zeichen' has formulas whose values") as raised:
        [*read_texts(path, options, as_lines=False)]
    assert "save it again" in raised.value.remedy


def test_columns_of_a_run_locate_the_header_of_its_table(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["Bericht 7\n", "Antwort;Preis\n", "Na ja;98,10\n", "Gut;7,5\n"])
    options = OtherData(earlier_columns={"text_column": "Antwort", "label_column": "Urteil"})
    source = read_source(tmp_path / "a.csv", options)
    assert source.frame.to_dict("list") == {"Antwort": ["Na ja", "Gut"], "Preis": ["98,10", "7,5"]}
    assert source.frame.index.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("rows", "has_header"),
    [
        (table(DATE, TEXT, LABEL, names="") , False),
        ([["Wann?", "Wie war das Essen? Bitte erklären"], *zip(DATE, TEXT, strict=True)], True),
        ([["Wie war das Essen? Bitte erklären", "Ja?"], *zip(TEXT, LABEL, strict=True)], True),
        ([["", "Antwort"], *zip(range(ROWS), TEXT, strict=True)], True),
        ([["Das Essen war heute besonders gut"], *([text] for text in TEXT)], False),
        ([["Antwort"], *([text] for text in TEXT)], True),
    ],
)  # fmt: skip
def test_first_row_with_a_text_is_not_a_header(
    rows: list[Any], has_header: bool, tmp_path: Path
) -> None:
    write(tmp_path / "a.csv", rows, ";")
    source = read_source(tmp_path / "a.csv", OtherData())
    assert len(source.frame) == ROWS + (not has_header and len(rows) > ROWS)
    assert source.format.has_header == has_header


def test_spreadsheet_cells_keep_their_types(tmp_path: Path) -> None:
    path = write_sheet(tmp_path / "a.xlsx", [["text", "n", "x"], ["a", 3, True], [None, 2.5, "y"]])
    source = read_source(path, DataConfig())
    assert source.frame.to_dict("list") == {"text": ["a", None], "n": [3, 2.5], "x": [True, "y"]}
    assert isinstance(source.layout, Sheet)
