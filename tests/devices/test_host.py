import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machines import INTEL_MAC, LINUX, LINUX_WITH_CUDA, Machine, a_mac, simulate

from finetune.devices import host
from finetune.devices.host import (
    FALLBACK,
    HIGH,
    PREFER_METAL,
    Check,
    GroupLimit,
    check_variables,
    group_limits,
    high_ratio,
    process_bytes,
)


@pytest.mark.parametrize(
    ("machine", "instructions"),
    [
        (LINUX, []),
        (LINUX_WITH_CUDA, ["avx512_bf16", "amx_bf16"]),
        (replace(LINUX, cpuinfo="processor\t: 0\nFeatures\t: fp asimd i8mm bf16"), ["bf16"]),
        (replace(LINUX, cpuinfo=""), []),
        (a_mac(chip="Apple M1"), []),
        (a_mac(chip="Apple M2"), ["FEAT_BF16"]),
        (INTEL_MAC, []),
    ],
)
def test_bf16_instructions_are_detected_from_system_names(
    machine: Machine, instructions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(machine, monkeypatch)
    assert host.bf16_instructions() == instructions


FOOTPRINT_BYTES = 62_700_000_000


def test_process_memory_on_macos_is_the_footprint(
    simulate_mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated kernel has one process, 7, and writes the 96 bytes of rusage_info_v0."""

    def proc_pid_rusage(process_id: int, version: int, pointer: Any) -> int:
        if process_id != 7:
            return -1
        assert version == 0
        numbers = [0] * 12
        numbers[8], numbers[9] = 4_100_000_000, FOOTPRINT_BYTES  # resident size, footprint
        usage = (ctypes.c_uint64 * 12)(*numbers)
        ctypes.memmove(pointer, usage, ctypes.sizeof(usage))
        return 0

    simulate_mac()
    library = SimpleNamespace(proc_pid_rusage=proc_pid_rusage)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert process_bytes(7) == FOOTPRINT_BYTES
    assert process_bytes(8) == 0


MIB = 2**20


def write_group(
    folder: Path, *, limit: str, usage: int, droppable: int = 0, high: str = "max"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\nslab 3\n")


def limits_of(folder: Path, group: str) -> list[GroupLimit]:
    process = folder / "cgroup"
    process.write_text(f"0::{group}\n")
    return list(group_limits(process=process, root=folder / "fs"))


def test_limits_of_all_parent_control_groups_apply(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write_group(root / "user.slice", limit=str(4096 * MIB), usage=900 * MIB)
    write_group(root / "user.slice/session", limit="max", usage=800 * MIB)
    write_group(
        root / "user.slice/session/job", limit=str(512 * MIB), usage=300 * MIB, droppable=100 * MIB
    )
    assert limits_of(tmp_path, "/user.slice/session/job") == [
        GroupLimit(512 * MIB, 200 * MIB),
        GroupLimit(4096 * MIB, 900 * MIB),
    ]


@pytest.mark.parametrize("group", ["/", "/docker/1f2e", "/../../job"])
def test_container_root_is_its_own_control_group(group: str, tmp_path: Path) -> None:
    write_group(tmp_path / "fs", limit="max", high=str(64 * MIB), usage=10 * MIB)
    assert limits_of(tmp_path, group) == [GroupLimit(64 * MIB, 10 * MIB)]


def check_of(name: str) -> Check:
    [check] = [one for one in check_variables() if one.name == name]
    return check


@pytest.mark.parametrize(
    ("high", "ratio", "status"),
    [(None, 1.7, "ok"), ("0.8", 0.8, "ok"), ("0.0", 0.0, "warning"), ("1.5x", 0.0, "warning")],
)
def test_disabled_memory_limit_is_a_warning(
    high: str | None, ratio: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HIGH, raising=False)
    if high is not None:
        monkeypatch.setenv(HIGH, high)
    assert high_ratio() == ratio
    check = check_of("mps_watermarks")
    assert check.status == status
    assert ("lets a Mac swap" in check.finding) == bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize("variable", [FALLBACK, PREFER_METAL])
@pytest.mark.parametrize(("value", "status"), [("0", "ok"), ("1", "warning")])
def test_variables_that_slow_down_mps_are_warnings(
    variable: str, value: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    check = check_of("mps_fallback" if variable == FALLBACK else "mps_prefer_metal")
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else f"unset {variable}")
