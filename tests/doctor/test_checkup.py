"""Checks of simulated machines, from processor to device."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import hub_client
from machines import MACHINES, Machine, simulate

from finetune.devices.host import Check
from finetune.doctor.checkup import check_disk, check_hub, check_machine, check_packages

NAMES = {
    "processor", "system", "python", "packages", "memory", "run_disk", "hub_disk", "hub",
    "mps_watermarks", "mps_fallback", "mps_prefer_metal", "mps", "cuda", "device",
}  # fmt: skip


def check_machine_as(
    machine: Machine, patch: pytest.MonkeyPatch, *, device: str = "auto"
) -> dict[str, Check]:
    """Return the checks of a machine by name."""
    simulate(machine, patch)
    return {check.name: check for check in check_machine(device=device)}


def test_doctor_reports_distinct_findings_for_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = set()
    for name, machine in MACHINES.items():
        checks = check_machine_as(machine, monkeypatch)
        assert checks.keys() >= NAMES, name
        assert list(checks)[-1] == "device", name
        for check in checks.values():
            assert check.finding, name
            assert "\n" not in check.finding + check.remedy, name
            assert bool(check.remedy) == (check.status not in ("ok", "n/a")), name
            is_absent = check.name == "mps" and "needs a Mac" in check.finding
            assert is_absent == (check.name == "mps" and check.status == "n/a"), name
        emitted.add(frozenset((check.finding, check.remedy) for check in checks.values()))
    assert len(emitted) == len(MACHINES)


@pytest.mark.parametrize(
    ("name", "side", "finding", "remedy"),
    [
        ("an Intel Mac", "processor", "Intel(R) Core", "--device cpu"),
        ("Rosetta", "processor", "under Rosetta", "CONDA_SUBDIR=osx-arm64 conda create"),
        ("macOS 12.3", "mps", "MPS needs macOS 14 or newer, and this is 12.3", "Software Update"),
        ("M1 with 8 GB", "mps_memory", "5.3 GiB of 8.0 GiB", "--freeze-core"),
        ("a virtual Mac", "mps", "available, but an operation on it fails", "virtual Mac"),
    ],
)
def test_each_unready_machine_has_its_own_remedy(
    name: str, side: str, finding: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_machine_as(MACHINES[name], monkeypatch)[side]
    assert check.status == "warning"
    assert finding in check.finding
    assert remedy in check.remedy


@pytest.mark.parametrize("name", ["macOS 14", "macOS 26", "M4 Max"])
def test_ready_mac_trains_on_its_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = check_machine_as(MACHINES[name], monkeypatch, device="mps")
    assert {check.name for check in checks.values() if check.status not in ("ok", "n/a")} <= {"hub"}
    assert "built, available and usable" in checks["mps"].finding
    assert checks["device"].finding.startswith("--device mps uses mps")


def test_checks_without_pytorch_are_printed_before_pytorch_crashes(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()")
    child = subprocess.run(
        [sys.executable, "-m", "finetune", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTORCH_ENABLE_MPS_FALLBACK": "true"},
        capture_output=True,
        text=True,
    )
    assert child.returncode < 0
    finding, remedy = child.stdout.splitlines()[-3:-1]
    assert "PYTORCH_ENABLE_MPS_FALLBACK=true" in finding
    assert remedy.split() == ["try:", "unset", "PYTORCH_ENABLE_MPS_FALLBACK"]


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs package metadata, which hides the real metadata."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        header = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*header, *lines]) + "\n")

    return install


@pytest.mark.parametrize(
    ("package", "finding", "remedy"),
    [
        (("finetune", "0.10.0"), "another package", "--force-reinstall"),
        (("transformers", "4.57.1"), "transformers 4.57.1 is outside <", "'transformers<"),
        (
            ("finetune_mps", "0.1.0", "Requires-Dist: nosuchpackage<3,>=2"),
            "nosuchpackage is not installed",
            "'nosuchpackage<3,>=2'",
        ),
    ],
)
def test_missing_or_incompatible_package_is_reported_with_its_install_command(
    package: tuple[str, ...], finding: str, remedy: str, install: Install
) -> None:
    install(*package)
    [check] = check_packages()
    assert check.status == "failure"
    assert check.finding.startswith(finding)
    assert f"pip install {remedy}" in check.remedy


def test_nearly_full_disk_is_a_warning_with_the_required_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_200_000_000))
    check = check_disk("run_disk", tmp_path, remedy="make room")
    assert (check.status, check.remedy) == ("warning", "make room")
    assert check.finding.startswith("1.2 GB free")
    assert "needs up to 3.5 GB" in check.finding


def test_unreachable_hub_is_a_warning(tmp_path: Path) -> None:
    with hub_client(endpoint="http://127.0.0.1:9", home=tmp_path):
        check = check_hub()
    assert check.status == "warning"
    assert "http://127.0.0.1:9 can't be reached" in check.finding
    assert "HF_ENDPOINT" in check.remedy
