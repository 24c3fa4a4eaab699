"""``finetune cache`` and ``finetune cache clear``."""

import json
from pathlib import Path

from tiny_runs import Command

from finetune.files import SCHEMA_VERSION, WRITTEN_BY, write_cache_json
from finetune.model.tensor_store import TensorStore


def store_features(cache: Path, key: str = "a" * 64, *, rows: int = 1234) -> int:
    """Store features as a run does, and return the size of the entry in bytes."""
    store = TensorStore(cache / "features", limit_bytes=2**30)
    with store.creating(key, (rows, 32)):
        pass
    return (cache / "features" / f"{key}.features").stat().st_size


def normalized_lines(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines() if line]


def test_cache_prints_its_size_and_clear_deletes_all_entries(
    command: Command, tmp_path: Path
) -> None:
    size_bytes = store_features(tmp_path, rows=40_000)
    files = [tmp_path / "batches" / "a.json", tmp_path / "precision" / "b.json"]
    for file in files:
        write_cache_json(file, WRITTEN_BY)
    place = ("--cache-dir", tmp_path)
    lines = normalized_lines(command("cache", *place).output)
    folder = tmp_path / "features"
    assert lines == [
        f"4.9 MiB in {folder}: features of 1 splits",
        "2 files with batch sizes and timings, next to that folder",
    ]
    found = json.loads(command("cache", *place, "--json").output)
    counts = {"entries": 1, "measured_files": 2}
    assert found == {
        "schema_version": SCHEMA_VERSION, "folder": str(folder), "size_bytes": size_bytes, **counts,
    }  # fmt: skip
    assert normalized_lines(command("cache", "clear", *place).output) == [
        f"deleted {one}" for one in lines
    ]
    assert list(folder.iterdir()) == []
    assert not any(file.exists() for file in files)
    store_features(tmp_path, rows=40_000)
    cleared = json.loads(command("cache", *place, "clear", "--json").output)
    assert cleared["freed_bytes"] == size_bytes
