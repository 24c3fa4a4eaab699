"""Large tables in files that are mapped: the same rows, and no texts in memory."""

import tracemalloc
from pathlib import Path

import pandas  # type: ignore[import-untyped]
import pyarrow
import pytest
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data import formats, mapped, parquet_files
from finetune.data.dataset import LoadedData
from finetune.data.load import load_splits
from finetune.events import ignore
from finetune.runs.manifest import digest_splits

ROWS, CHARACTERS = 1000, 4000


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of 4 MB with two columns of texts, some of them blank."""
    texts = [f"{row} was here " + "x" * CHARACTERS if row % 9 else " " for row in range(ROWS)]
    columns = {
        "text": texts,
        "more": [f"{row} " for row in range(ROWS)],
        "label": ["yes" if row % 3 else "no" for row in range(ROWS)],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet", row_group_size=300)
    return tmp_path / "table.parquet"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take tables of 100 kB for large ones; return the folder of their files."""
    monkeypatch.setattr("finetune.hub.cache_folder", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(mapped, "LARGE_BYTES", 100_000)
    monkeypatch.setattr(mapped, "PIECE_ROWS", 64)
    monkeypatch.setattr(parquet_files, "STREAM_ROWS", 10)
    return tmp_path / "cache" / "tables"


def load(table: Path, *, text_column: str) -> LoadedData:
    options = DataConfig(str(table), text_column=text_column)
    return load_splits(options, emit=ignore)


@pytest.mark.parametrize("text_column", ["text", "text,more"])
def test_a_large_table_is_the_same_as_in_memory(
    text_column: str, table: Path, request: pytest.FixtureRequest
) -> None:
    expected = load(table, text_column=text_column)
    cache = request.getfixturevalue("cache")
    found = load(table, text_column=text_column)
    assert digest_splits(found.splits, found.task) == digest_splits(expected.splits, expected.task)
    assert cache.is_dir()
    assert not list(cache.iterdir())


def test_memory_does_not_hold_the_texts_of_a_large_table(table: Path, cache: Path) -> None:
    before_bytes = pyarrow.total_allocated_bytes()
    loaded = load(table, text_column="text")
    assert sum(loaded.splits.num_rows.values()) > ROWS // 2
    assert pyarrow.total_allocated_bytes() - before_bytes < ROWS * CHARACTERS / 20


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_memory_does_not_hold_a_text_file(
    suffix: str, table: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.encoding.CHUNK_BYTES", 2**16)
    monkeypatch.setattr("finetune.data.delimited.HEADER_ROWS", 10)
    monkeypatch.setattr("finetune.data.delimited.SAMPLE_CHARACTERS", 2**16)
    monkeypatch.setattr("finetune.data.reader.STREAM_ROWS", 10)
    path, frame = table.with_suffix(f".{suffix}"), pandas.read_parquet(table)
    if suffix == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    before_bytes = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    read = formats.read_file(path, DataConfig(str(path)), emit=ignore)
    assert tracemalloc.get_traced_memory()[1] < ROWS * CHARACTERS / 4
    tracemalloc.stop()
    assert read.columns.to_pandas().equals(frame)
    assert pyarrow.total_allocated_bytes() - before_bytes < ROWS * CHARACTERS / 20
