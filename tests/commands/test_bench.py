"""``finetune bench``. One test measures, the others use recorded timings."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.example_results import example_results
from tiny_runs import Command, finetune_in_a_child

from finetune.bench import workloads
from finetune.bench.results import Row
from finetune.files import read_json

ROWS = [replace(row, group="mlp") for row in example_results().rows if row.device == "cpu"]


def time_all(*_: Any, **__: Any) -> Iterator[list[Row]]:
    yield ROWS[:2]
    yield ROWS[:3]


def stop_with_ctrl_c(*_: Any, **__: Any) -> Iterator[list[Row]]:
    yield [ROWS[0]]
    raise KeyboardInterrupt


def test_bench_prints_tables_and_writes_json_and_html(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "measure", time_all)
    outcome = command("bench", "mlp", "--device", "cpu", "--output-dir", tmp_path / "b")
    assert outcome.code == 0, outcome.errors
    assert "A network of three layers" in outcome.output
    assert f"results and page: {tmp_path / 'b'}" in outcome.output
    written = read_json(tmp_path / "b" / "bench.json")["rows"]
    assert [one["workload"] for one in written] == [row.workload for row in ROWS[:3]]
    assert (tmp_path / "b" / "bench.html").read_text().startswith("<!doctype html>")


def test_contribute_prints_results_as_yaml_rows(command: Command, tmp_path: Path) -> None:
    rejected = command("bench", "--contribute", "--output-dir", tmp_path)
    rejected.assert_rejected(2, str(tmp_path), "finetune bench")
    content = json.dumps(example_results(gpu="mps").to_json())
    (tmp_path / "bench.json").write_text(content)
    rows = yaml.safe_load(command("bench", "--contribute", "--output-dir", tmp_path).output)
    year = str(date.today().year)
    row = ["inference", "batch 8", "A <fast> chip", "2 threads", year, "YOUR NAME", 100.0]
    assert rows[0] == row
    assert len(rows) == 5


def test_ctrl_c_keeps_finished_measurements(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "measure", stop_with_ctrl_c)
    outcome = command("bench", "mlp", "--device", "cpu", "--output-dir", tmp_path)
    outcome.assert_rejected(130, "stopped", str(tmp_path))
    results = read_json(tmp_path / "bench.json")
    assert (results["is_complete"], len(results["rows"])) == (False, 1)
    assert "rows are missing" in (tmp_path / "bench.html").read_text()


@pytest.mark.parametrize("rows", [0, 1])
def test_interrupted_bench_keeps_earlier_complete_results(
    rows: int, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ("bench", "mlp", "--device", "cpu", "--output-dir", tmp_path)
    monkeypatch.setattr(workloads, "measure", time_all)
    assert command(*bench).code == 0
    before = [(tmp_path / name).read_bytes() for name in ("bench.json", "bench.html")]

    def stop_early(*arguments: Any) -> Iterator[list[Row]]:
        yield from islice(time_all(*arguments), rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(workloads, "measure", stop_early)
    command(*bench).assert_rejected(130, "keeps the earlier results", "run the command again")
    assert [(tmp_path / name).read_bytes() for name in ("bench.json", "bench.html")] == before
    command(*bench[:-1], tmp_path / "new").assert_rejected(130, "was stopped early")
    assert (tmp_path / "new" / "bench.json").is_file() == bool(rows)


@pytest.mark.slow
def test_bench_continues_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "own_networks.py").write_text(
        "import torch\n"
        "class Fragile(torch.nn.Linear):\n"
        "    def forward(self, input):\n"
        "        return super().forward(input) if self.training else input.no_such()\n"
        "def make(): return Fragile(3, 4), {'input': torch.ones(5, 3)}\n"
    )
    done = finetune_in_a_child(
        "bench", "mlp", "--quick", "--model", "own_networks:make", "--device", "cpu", "--json",
        "--output-dir", tmp_path / "bench", environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *timed, evaluation = json.loads(done.stdout)["rows"]
    assert [bool(row["rows_per_second"]) for row in timed] == [True] * 4
    assert evaluation["note"].startswith("AttributeError: ")
