"""``finetune cache``, and the options of a run that go with it."""

import json
from pathlib import Path

import pytest
import torch
from tiny_runs import Command

from finetune import hub
from finetune.files import WRITTEN_BY, keep_json
from finetune.model.tensor_store import TensorStore

NOTES = {"model": "[red]tiny[/]", "mode": "head", "data": "questions", "split": "train"}


def keep(cache: Path, key: str = "a" * 64, *, rows: int = 1234) -> int:
    """Keep some features as a run does; return the size of their entry."""
    store = TensorStore(cache / "features", limit_bytes=2**30)
    features = torch.ones(rows, 32)
    store.make_room(features.nbytes)
    notes = NOTES | {"rows": rows, "shape": [rows, 32]}
    store.write(key, {"features": features}, is_kept=True, notes=notes)
    return (cache / "features" / f"{key}.safetensors").stat().st_size


def lines_of(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines() if line]


def test_ls_shows_what_is_kept_and_how_much_it_is(command: Command, tmp_path: Path) -> None:
    keep(tmp_path, rows=40_000)
    outcome = command("cache", "ls", "--cache-dir", tmp_path)
    assert outcome.code == 0, outcome.errors
    header, line, total = lines_of(outcome.output)
    assert header == "last used size rows data split model mode"
    assert line.endswith("4.9 MiB 40,000 questions train [red]tiny[/] head")
    assert total == f"4.9 MiB in {tmp_path / 'features'}, 0 batch sizes and timings beside it"


def test_ls_prints_one_json_object(command: Command, tmp_path: Path) -> None:
    size_bytes = keep(tmp_path)
    outcome = command("cache", "ls", "--cache-dir", tmp_path, "--json")
    emitted = json.loads(outcome.output)
    assert (emitted["schema_version"], emitted["folder"]) == (1, str(tmp_path / "features"))
    [entry] = emitted["entries"]
    assert (entry["key"], entry["size_bytes"]) == ("a" * 64, size_bytes)
    assert entry["used_at"] > 1e9
    assert entry | NOTES | {"rows": 1234, "shape": [1234, 32], "dtype": "float32"} == entry


def test_clear_says_how_much_it_deleted(command: Command, tmp_path: Path) -> None:
    keep(tmp_path, rows=40_000)
    outcome = command("cache", "clear", "--cache-dir", tmp_path)
    deleted = f"deleted 4.9 MiB in {tmp_path / 'features'}, and 0 files beside it"
    assert lines_of(outcome.output) == [deleted]
    assert list((tmp_path / "features").iterdir()) == []
    size_bytes = keep(tmp_path, rows=40_000)
    emitted = json.loads(command("cache", "clear", "--cache-dir", tmp_path, "--json").output)
    assert emitted["freed_bytes"] == size_bytes


def test_batch_sizes_and_timings_are_listed_and_deleted_too(
    command: Command, tmp_path: Path
) -> None:
    files = [tmp_path / "batches" / "a.json", tmp_path / "precision" / "b.json"]
    for file in files:
        keep_json(file, WRITTEN_BY)
    listed = command("cache", "ls", "--cache-dir", tmp_path)
    assert "2 batch sizes and timings" in listed.output
    command("cache", "clear", "--cache-dir", tmp_path)
    assert not any(file.exists() for file in files)


def test_the_folder_comes_from_flag_environment_or_the_hubs_cache(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder_of(*arguments: str) -> str:
        folder = json.loads(command("cache", "ls", "--json", *arguments).output)["folder"]
        assert isinstance(folder, str)
        return folder

    assert folder_of() == str(hub.cache_folder("features"))
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(tmp_path / "variable"))
    assert folder_of() == str(tmp_path / "variable" / "features")
    assert folder_of("--cache-dir", str(tmp_path / "flag")) == str(tmp_path / "flag" / "features")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of("--cache-dir", "~/mine") == str(tmp_path / "mine" / "features")
