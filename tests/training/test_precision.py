"""``--precision auto`` with simulated timings."""

import pickle
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prepared_runs import was_emitted
from tiny_runs import run_tiny

from finetune.config.schema import AutoTunedOption
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.events import Event, Info
from finetune.files import read_json
from finetune.training import precision
from finetune.training.precision import choose_precision, note_parity

FASTER = AutoTunedOption("precision", "bf16", "ms", {}, "it is planted")
SLOWER = AutoTunedOption("precision", "fp32", "ms", {}, "it is planted")
SHORT: dict[str, Any] = {"precision": "auto", "max_train_samples": 16, "max_steps": 3}


class PlantedTiming:
    """Counts its calls and always returns the same result."""

    def __init__(self) -> None:
        self.count, self.result = 0, FASTER

    def __call__(self, device: Device, hidden_size: int) -> AutoTunedOption:
        self.count += 1
        return self.result


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> PlantedTiming:
    monkeypatch.setattr(host, "bf16_instructions", lambda: ["amx_bf16"])
    planted = PlantedTiming()
    monkeypatch.setattr(precision, "_time_layer", planted)
    return planted


def choose(cache: Path, *, hidden_size: int = 32) -> str:
    return choose_precision(CpuDevice(), hidden_size=hidden_size, cache=cache).value


def test_timing_is_cached_per_size_and_version(
    timing: PlantedTiming, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(tmp_path) == "bf16"
    timing.result = SLOWER
    again = choose_precision(CpuDevice(), hidden_size=32, cache=tmp_path)
    assert (again.value, again.note) == ("bf16", f"it is planted, measured on {date.today()}")
    assert choose(tmp_path, hidden_size=64) == "fp32"
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert choose(tmp_path) == "fp32"
    assert timing.count == 3


@pytest.mark.parametrize(
    ("attributes", "instructions", "expected"),
    [
        ({}, [], "fp32"),
        ({"precisions": ("fp32", "fp16")}, ["amx_bf16"], "fp32"),
        ({"times_bf16": False}, [], "bf16"),
    ],
)
def test_timing_is_skipped_if_the_hardware_decides(
    attributes: dict[str, Any],
    instructions: list[str],
    expected: str,
    timing: PlantedTiming,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "bf16_instructions", lambda: instructions)
    for name, value in attributes.items():
        monkeypatch.setattr(CpuDevice, name, value)
    choice = choose_precision(CpuDevice(), hidden_size=32, cache=tmp_path)
    assert (choice.value, timing.count) == (expected, 0)
    # The choice is sent to other ranks and written to environment.json.
    assert pickle.loads(pickle.dumps(choice)) == AutoTunedOption(**asdict(choice))


def test_device_with_silent_faults_needs_parity_for_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "has_silent_faults", True)
    monkeypatch.setattr(CpuDevice, "times_bf16", False)
    monkeypatch.setattr("finetune.hub.cache_folder", lambda name: tmp_path / name)
    assert choose(tmp_path) == "fp32"
    note_parity(CpuDevice(), precision="fp16", subject="BERT", passes=True)
    assert choose(tmp_path) == "fp32"
    note_parity(CpuDevice(), precision="bf16", subject="BERT", passes=True)
    assert choose(tmp_path) == "bf16"
    note_parity(CpuDevice(), precision="bf16", subject="MiniLM", passes=False)
    assert choose(tmp_path) == "fp32"
    note_parity(CpuDevice(), precision="bf16", subject="MiniLM", passes=True)
    assert choose(tmp_path) == "bf16"


def test_precision_and_its_reason_are_reported_and_saved(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    run_tiny(run, model=tiny_folder, cache_dir=cache, emit=events.append, **SHORT)
    assert was_emitted(
        events, Info, "precision: bf16, because it is planted; precision overrides it"
    )
    results = read_json(run / "all_results.json")
    assert (results["precision"], results["precision_reason"]) == ("bf16", "it is planted")
    assert "it is planted" in (run / "report.html").read_text()
    assert "in bf16 (it is planted)" in (run / "model" / "README.md").read_text()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["training"]["precision"] == "bf16"
    assert timing.count == 1
