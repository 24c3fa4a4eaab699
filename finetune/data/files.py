"""Files of rows, in each format that is read."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet, types

from finetune.data.delimited import read_delimited
from finetune.data.encoding import decode
from finetune.data.raw import RawTable, as_text
from finetune.errors import DataNotFound, DataUnreadable
from finetune.events import Emit, Stage


def read_file(path: Path, *, emit: Emit) -> RawTable:
    """Read a file of rows; its suffix tells the format.

    Args:
        path: A file with one of the suffixes ``SUFFIXES``.
        emit: Is told what is read, and how.

    Raises:
        DataNotFound: If there is no such file.
        DataUnreadable: If the format is none of those known, or the file does not parse.
    """
    if not path.is_file():
        raise DataNotFound(f"there is no file {path}", remedy="check the name")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise DataUnreadable(
            f"{path} is in no format that is read", remedy=f"save it as {', '.join(SUFFIXES)}"
        )
    try:
        return read(path, emit=emit)
    except OSError as error:
        raise DataUnreadable(
            f"{path} can't be read: {str(error).splitlines()[0]}",
            remedy="check that it is complete, and yours to read",
        ) from error


def read_json_lines(path: Path, *, emit: Emit) -> RawTable:
    """Read a file with one JSON object a line; columns of lists or objects are left out.

    Raises:
        DataUnreadable: If a line is no JSON object, or the file holds none.
    """
    text, encoding = decode(path.read_bytes(), path=path)
    emit(Stage(f"reading {path}: {encoding}"))
    numbers, rows = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            numbers.append(number)
            rows.append(_parse_object(line, place=f"line {number} of {path}"))
    if not rows:
        raise DataUnreadable(f"{path} is empty", remedy="write one JSON object a line")
    names = dict.fromkeys(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, list | dict)}
    values = {
        name: [_mended(as_text(row.get(name))) for row in rows]
        for name in names
        if name not in nested
    }
    return RawTable(path, values, unit="line", numbers=numbers)


def read_parquet(path: Path, *, emit: Emit) -> RawTable:
    """Read the columns of a Parquet file that hold texts or numbers.

    A column of numbers that the library datasets wrote with the names of its classes is read as
    these names; a number that stands for no class, such as -1, as nothing.

    Raises:
        DataUnreadable: If the file is not Parquet, or holds no rows.
    """
    emit(Stage(f"reading {path}"))
    try:
        file = parquet.ParquetFile(path)
        names = [column.name for column in file.schema_arrow if _is_plain(column.type)]
        table = file.read(columns=names)
    except pyarrow.ArrowException as error:
        raise DataUnreadable(
            f"{path} is not Parquet: {str(error).splitlines()[0]}", remedy="write it anew"
        ) from error
    if len(table) == 0:
        raise DataUnreadable(f"{path} holds no rows", remedy="write it anew")
    class_names = _class_names(file.schema_arrow.metadata or {})
    values = {}
    for name in names:
        column = table[name].to_pylist()
        if name in class_names:
            column = [_name_of(number, class_names[name]) for number in column]
        values[name] = [as_text(value) for value in column]
    return RawTable(
        path, values, unit="row", numbers=range(1, len(table) + 1), class_names=class_names
    )


_READERS: Mapping[str, Callable[..., RawTable]] = {
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".jsonl": read_json_lines,
    ".parquet": read_parquet,
}
SUFFIXES = tuple(_READERS)


def _parse_object(line: str, *, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        complaint = f"{place} is not JSON, {error.msg} at column {error.colno}"
    else:
        if isinstance(value, dict):
            return value
        complaint = f"{place} is not a JSON object"
    raise DataUnreadable(
        f"{complaint}: {line.strip()[:60]!r}",
        remedy='write one object a line, such as {"text": "Good.", "label": "praise"}',
    )


def _mended(text: str) -> str:
    """Return a text without halves of characters, which JSON can spell and nothing can store."""
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _is_plain(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds a text, a number or a truth value a row."""
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_floating)
    return types.is_boolean(kind) or any(is_of(kind) for is_of in tests)


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of classes that the library datasets keeps beside the columns."""
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return {
        name: feature["names"]
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _name_of(number: int | None, names: list[str]) -> str | None:
    return names[number] if number is not None and 0 <= number < len(names) else None
