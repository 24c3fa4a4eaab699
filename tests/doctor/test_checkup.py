"""Whole machines, from processor to device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import LINUX, MACHINES, Machine, a_mac, pretend

from finetune.devices.check import Check
from finetune.doctor.checkup import check_machine

NAMES = {
    "processor", "system", "python", "packages", "memory", "bf16", "run_disk", "hub_disk", "hub",
    "mps_watermarks", "mps_fallback", "mps", "cuda", "device",
}  # fmt: skip


def look_at(
    machine: Machine, patch: pytest.MonkeyPatch, *, device: str = "auto"
) -> dict[str, Check]:
    """Return the checks of a machine by their names."""
    pretend(machine, patch)
    return {check.name: check for check in check_machine(device=device)}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_is_looked_at_from_all_sides(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = look_at(machine, monkeypatch)
    assert found.keys() >= NAMES
    assert list(found)[-1] == "device"
    for check in found.values():
        assert check.finding
        assert "\n" not in check.finding + check.remedy
        assert bool(check.remedy) == (check.status != "ok")


def test_all_machines_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = {
        name: frozenset((one.finding, one.remedy) for one in look_at(machine, monkeypatch).values())
        for name, machine in MACHINES.items()
    }
    assert len(set(emitted.values())) == len(MACHINES)


@pytest.mark.parametrize(
    ("name", "side", "finding", "remedy"),
    [
        ("an Intel Mac", "processor", "Intel(R) Core", "--device cpu"),
        ("Rosetta", "processor", "under Rosetta", "CONDA_SUBDIR=osx-arm64 conda create"),
        ("macOS 12.3", "system", "12.3: the GPU needs macOS 14", "System Preferences"),
        ("macOS 13", "system", "13.6: the GPU needs macOS 14", "System Settings"),
        ("M1 with 8 GB", "mps_memory", "5.3 GiB of 8.0 GiB", "--freeze-core"),
        ("a virtual Mac", "mps", "available, but an operation on it fails", "virtual Mac"),
    ],
)
def test_each_machine_that_is_not_ready_has_its_own_remedy(
    name: str, side: str, finding: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = look_at(MACHINES[name], monkeypatch)[side]
    assert check.status == "warning"
    assert finding in check.finding
    assert remedy in check.remedy


@pytest.mark.parametrize("name", ["macOS 14", "macOS 26", "M4 Max"])
def test_a_mac_that_is_ready_trains_on_its_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_at(MACHINES[name], monkeypatch, device="mps")
    assert {check.name for check in found.values() if check.status != "ok"} <= {"hub"}
    assert "built, available and usable" in found["mps"].finding
    assert found["device"].finding.startswith("--device mps takes mps")


@pytest.mark.parametrize(
    ("name", "device"),
    [("M4 Max", "mps"), ("Linux with CUDA", "cuda"), ("a virtual Mac", "cpu"), ("Rosetta", "cpu")],
)
def test_auto_takes_the_best_device_that_works(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = look_at(MACHINES[name], monkeypatch)["device"]
    assert check.status == "ok"
    assert f"--device auto takes {device} " in check.finding


@pytest.mark.parametrize("name", ["Rosetta", "macOS 13", "a virtual Mac", "Linux without a GPU"])
def test_a_device_that_was_asked_for_and_does_not_work_is_a_failure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = look_at(MACHINES[name], monkeypatch, device="mps")["device"]
    assert check.status == "failure"
    assert check.remedy


def test_a_gpu_that_is_not_there_is_nothing_to_warn_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look_at(LINUX, monkeypatch)
    assert found["mps"] == Check("mps", "ok", "MPS needs a Mac, and this is Linux")
    assert found["cuda"].status == "ok"


def test_watermarks_that_pytorch_refuses_are_the_remedy_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.7")
    found = look_at(a_mac(failure="invalid low watermark ratio 1.4"), monkeypatch)
    assert found["mps_watermarks"].status == "failure"
    assert found["mps"].remedy.startswith("unset PYTORCH_MPS_HIGH_WATERMARK_RATIO")


def test_a_pytorch_that_can_not_be_imported_is_told_after_all_that_needs_none(
    tmp_path: Path,
) -> None:
    text = "dlopen(libtorch.dylib): mach-o file, but is an incompatible architecture"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({text!r})")
    child = subprocess.run(
        [sys.executable, "-m", "finetune", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 4, child.stderr
    assert child.stderr == ""
    *others, device, remedy = child.stdout.splitlines()
    assert device.startswith("failure  device")
    assert text in device
    assert "pip install" in remedy
    assert sum(line.startswith("ok") for line in others) >= 8


def test_what_needs_no_pytorch_is_told_where_pytorch_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()")
    child = subprocess.run(
        [sys.executable, "-m", "finetune", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTORCH_ENABLE_MPS_FALLBACK": "true"},
        capture_output=True,
        text=True,
    )
    assert child.returncode < 0
    *_, finding, remedy = child.stdout.splitlines()
    assert "PYTORCH_ENABLE_MPS_FALLBACK=true ends PyTorch" in finding
    assert remedy.split() == ["try:", "unset", "PYTORCH_ENABLE_MPS_FALLBACK"]
