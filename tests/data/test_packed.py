"""Tables that are packed: gzip, archives, and what is made to fill the memory."""

import bz2
import gzip
import io
import lzma
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import openpyxl
import pyarrow
import pytest
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data import packed
from finetune.data.read import RawTable, read_file
from finetune.data.stream import read_texts
from finetune.errors import DataUnreadableError

CSV = b"text,label\nthe film,good\nthe end,bad\n"
COLUMNS = {"text": ["the film", "the end"], "label": ["good", "bad"]}


def read(path: Path) -> RawTable:
    return read_file(path, DataConfig(str(path)))


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def parquet_bytes() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(COLUMNS), file)
    return file.getvalue()


def write_workbook(path: Path, **sheets: list[list[object]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def test_a_packed_table_is_read_as_it_was(tmp_path: Path) -> None:
    lines = b'{"text": "the film", "label": "good"}\n{"text": "the end", "label": "bad"}\n'
    for name, content in {"a.csv": CSV, "a.jsonl": lines, "a.parquet": parquet_bytes()}.items():
        for suffix, module in {"gz": gzip, "bz2": bz2, "xz": lzma}.items():
            path = tmp_path / f"{name}.{suffix}"
            path.write_bytes(module.compress(content))
            table = read(path)
            assert table.columns.to_pydict() == COLUMNS
            assert table.place(1).endswith(f" of {path}")
    archive = pack(
        tmp_path / "a.zip", {"data/rows.csv": CSV, "a.md": b"#", "__MACOSX/rows.csv": b""}
    )
    assert read(archive).columns.to_pydict() == COLUMNS
    assert read(archive).place(1) == f"line 3 of {archive}/data/rows.csv"
    assert read(pack(tmp_path / "b.zip", {"./rows.csv": CSV})).columns.to_pydict() == COLUMNS
    one = pack(tmp_path / "sms.zip", {"SMSCollection": CSV, "readme": b"about"})
    assert read(one).columns.to_pydict() == COLUMNS


def test_packed_texts_are_predicted_too(tmp_path: Path) -> None:
    rows: list[list[object]] = [["text", "label"], ["the film", "good"], ["the end", "bad"]]
    for path in (
        pack(tmp_path / "a.zip", {"rows.csv": CSV}),
        write_workbook(tmp_path / "a.xlsx", reviews=rows),
    ):
        [read] = read_texts(path, DataConfig(str(path)), as_lines=False)
        assert read[:].texts == ["the film", "the end"]
        assert [row["label"] for row in read.records()] == ["good", "bad"]


def test_what_can_not_be_unpacked_is_refused(tmp_path: Path) -> None:
    two = pack(tmp_path / "two.zip", {"a.csv": CSV, "b.csv": CSV})
    with pytest.raises(DataUnreadableError, match=r"holds 2 tables: a\.csv, b\.csv"):
        read(two)
    for start in (gzip.compress(CSV)[:-9], gzip.compress(CSV)[:3], two.read_bytes()[:-30]):
        cut = tmp_path / "cut.csv"
        cut.write_bytes(start)
        with pytest.raises(DataUnreadableError, match="can't be unpacked"):
            read(cut)


def test_what_becomes_far_larger_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "SMALL_BYTES", 10_000)
    bomb = tmp_path / "bomb.csv.gz"
    bomb.write_bytes(gzip.compress(CSV + b"a" * 10**6))
    archive = pack(tmp_path / "bomb.zip", {"rows.csv": CSV + b"a" * 10**6})
    book = pack(tmp_path / "bomb.xlsx", {"xl/workbook.xml": b" " * 10**6})
    for path in (bomb, archive, book):
        with pytest.raises(DataUnreadableError, match="more than 100 times"):
            read(path)


def test_the_one_sheet_of_a_workbook_is_read(tmp_path: Path) -> None:
    rows: list[list[object]] = [["text", "stars"], ["the film", 5], [None, None]]
    rows.append(["the_x000D_\nend", 1.5])
    path = write_workbook(tmp_path / "a.xlsx", reviews=rows, empty=[])
    assert read(path).columns.to_pydict() == {
        "text": ["the film", "the\r\nend"],
        "stars": ["5", "1.5"],
    }
    with pytest.raises(DataUnreadableError, match="2 tables: a, b"):
        read(write_workbook(tmp_path / "b.xlsx", a=rows, b=rows))
    with pytest.raises(DataUnreadableError, match="can't be read as a spreadsheet"):
        read(pack(tmp_path / "c.xlsx", {"xl/workbook.xml": b"<"}))
