import json
import sys
from pathlib import Path

import pytest
from machines import MACHINES, simulate
from tiny_runs import Command

from finetune.devices.cpu import CpuDevice
from finetune.doctor import models
from finetune.training.checks import Difference
from finetune.training.precision import has_parity

PARITY = ("doctor", "--parity", "--device", "cpu", "--batch-size", "7")


def test_each_line_starts_with_a_status_and_remedies_follow_findings(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(MACHINES["Rosetta"], monkeypatch)
    outcome = command("doctor")
    assert outcome.code == 0
    assert outcome.errors == ""
    lines = outcome.output.splitlines()
    processor = next(number for number, line in enumerate(lines) if "under Rosetta" in line)
    assert lines[processor].startswith("warning  processor        x86_64, Apple M1: ")
    assert "install a Python for arm64" in lines[processor + 1]
    for line in lines:
        assert line.startswith(
            ("ok       ", "n/a      ", "warning  ", "failure  ", " " * 26 + "try: ")
        )
        assert line[25] == " "


@pytest.mark.parametrize(
    ("name", "device", "code"), [("M4 Max", "mps", 0), ("M4 Max", "cuda", 4), ("Rosetta", "mps", 4)]
)
def test_exit_code_is_4_if_the_device_does_not_work(
    name: str, device: str, code: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(MACHINES[name], monkeypatch)
    outcome = command("doctor", "--device", device, "--json")
    assert (outcome.code, outcome.errors) == (code, "")
    statuses = {check["name"]: check["status"] for check in json.loads(outcome.output)["checks"]}
    assert statuses["device"] == ("failure" if code else "ok")
    monkeypatch.setenv("FINETUNE_DEVICE", device)  # finetune run reads this variable
    assert command("doctor").code == code


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a function that returns a batch and a module that MPS can't run."""
    (tmp_path / "user_modules.py").write_text(
        "import torch\n"
        "class Mode(torch.nn.Module):\n"
        "    def forward(self, rows): return rows.mode().values.double()\n"
        "def make(): return Mode(), {'rows': torch.ones(2, 3)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_modules", raising=False)
    return "user_modules:make"


def test_missing_operator_is_reported_and_fails(command: Command, factory: str) -> None:
    outcome = command("doctor", "--ops", "--model", factory)
    assert outcome.code == 1
    [mode] = [line for line in outcome.output.splitlines() if line.startswith("aten::mode ")]
    assert mode.split() == ["aten::mode", "missing", "1", "Mode"]
    assert "warning: MPS has no aten::mode, which Mode calls\n  try: " in outcome.output
    assert "which MPS doesn't support" in outcome.output
    assert outcome.errors.startswith("error: MPS lacks aten::mode\n  try: ")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.hub.cache_folder", lambda name: tmp_path / name)


@pytest.mark.usefixtures("cache")
def test_parity_reports_each_part_and_caches_the_result(
    command: Command, tiny_folder: Path
) -> None:
    outcome = command(*PARITY, "--model", tiny_folder, "--precision", "bf16")
    assert outcome.code == 0, outcome.errors
    assert "in bf16 with the CPU in fp32" in outcome.errors
    titles, *parts, result = filter(None, outcome.output.splitlines())
    assert titles.split()[0] == "part"
    assert [line.split()[0] for line in parts] == ["logits", "gradients", "changes"]
    assert all(" ok " in line for line in parts)
    assert result == "cpu in bf16 agrees with the CPU in fp32"
    assert has_parity(CpuDevice(), precision="bf16")


@pytest.mark.usefixtures("cache")
def test_failed_parity_reports_the_difference(
    command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Difference("logits", "8 x 64 tokens", error=0.5, tolerance=0.04)
    monkeypatch.setattr(models, "compare_with_cpu", lambda *_, **__: [wrong])
    outcome = command(*PARITY, "--model", tiny_folder, "--precision", "bf16", "--json")
    assert outcome.code == 1
    assert json.loads(outcome.output)["passes"] is False
    assert not has_parity(CpuDevice(), precision="bf16")
    assert "error: cpu in bf16 differs from the CPU: logits" in outcome.errors
