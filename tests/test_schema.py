"""The keys of the JSON output that other programs read, recorded with their schema version."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.example_results import example_results as example_bench
from report.example_run import example_results
from tiny_runs import Command, copy_run

from finetune.batch_finder.results import FoundBatches, Result
from finetune.events import Trial
from finetune.files import SCHEMA_VERSION, read_json
from finetune.runs.several import SeveralResults

RECORD = Path(__file__).with_name("schema.yaml")
# Mappings with arbitrary keys, such as class names, stages or runs.
OPEN = {"per_class", "class_rows", "stage_seconds", "lengths", "runs", "options", "devices"}
OPEN |= {"versions", "probabilities", "templates"}


def keys_of(value: Any, place: str = "") -> Iterator[str]:
    """Yield the paths of all keys, with ``*`` for keys of open mappings."""
    for item in value if isinstance(value, list | tuple) else []:
        yield from keys_of(item, place)
    is_open = place.rpartition(".")[2].removeprefix("test_").removeprefix("eval_") in OPEN
    for key, item in value.items() if isinstance(value, Mapping) else []:
        path = f"{place}.{'*' if is_open else key}".lstrip(".")
        yield path
        yield from keys_of(item, path)


def run_results(folder: Path) -> dict[str, Any]:
    results = read_json(folder / "all_results.json")
    # The words of a tiny model are arbitrary.
    results["details"]["class_words"].clear()
    return results


def several(kind: str, **more: Any) -> dict[str, Any]:
    run = example_results()
    return SeveralResults(kind, [1, 2], {1: run, 2: run}, "runs", "accuracy", **more).to_json()


def printed(command: Command, *arguments: Any) -> dict[str, Any]:
    done = command(*arguments, "--json")
    assert done.code == 0, done.errors
    return dict(json.loads(done.output))


def list_first(value: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a mapping whose list has the keys of its first item only, without nested keys."""
    return value | {key: None, "item": dict.fromkeys(value[key][0])}


@pytest.fixture
def outputs(
    finished_run: Path,
    tiny_folder: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Functions that return the JSON of each command."""
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "table.csv"
    rows = [f"who wrote the book {n} ?,{'ab'[n % 2]}" for n in range(60)]
    table.write_text("\n".join(["text,label", *rows, "who wrote the book 1 ?,a"]))

    def compare() -> dict[str, Any]:
        changed = copy_run(finished_run, tmp_path / "copy", answers=["HUM", "LOC", "NUM"])
        return printed(command, "compare", finished_run, changed)

    return {
        "run": lambda: run_results(finished_run),
        "seeds": lambda: several("seeds", best=1),
        "folds": lambda: several("folds", scores=example_results().test),
        "sweep": lambda: several("sweep", best=1, options={1: {"seed": 1}, 2: {"seed": 2}}),
        "evaluate": lambda: printed(command, "evaluate", finished_run),
        "predict": lambda: printed(command, "predict", finished_run, "Who?"),
        "compare": compare,
        "bench": lambda: example_bench().to_json(),
        "find-batch": lambda: FoundBatches((Result(trials=(Trial(1, "fits"),)),)).to_json(),
        "data check": lambda: printed(command, "data", "check", table, "--model", "other/model"),
        "data audit": lambda: printed(command, "data", "audit", table, "--model", tiny_folder),
        "runs": lambda: list_first(printed(command, "runs", finished_run.parent), "runs"),
        "models": lambda: list_first(printed(command, "models"), "models"),
        "config show": lambda: list_first(printed(command, "config", "show"), "options"),
        "config ls": lambda: dict.fromkeys(printed(command, "config", "ls")),
        "cache": lambda: printed(command, "cache"),
        "init": lambda: dict.fromkeys(printed(command, "init", table, "--model", "other/model")),
        "doctor": lambda: list_first(printed(command, "doctor", "--device", "cpu"), "checks"),
    }


def test_changed_keys_require_a_new_schema_version(
    outputs: Mapping[str, Callable[[], dict[str, Any]]],
) -> None:
    recorded = yaml.safe_load(RECORD.read_text())
    keys = {name: " ".join(sorted({*keys_of(make())})) for name, make in outputs.items()}
    current = yaml.safe_dump({"schema_version": SCHEMA_VERSION, "keys": keys}, width=96)
    remedy = "raise SCHEMA_VERSION in finetune/files.py, and replace tests/schema.yaml with:"
    assert recorded == yaml.safe_load(current), f"{remedy}\n{current}"
