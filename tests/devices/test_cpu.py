"""CPU memory, as reported by systems other than Linux."""

import platform
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.devices import cpu


def test_peak_memory_on_macos_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    assert cpu.CpuMemory().peak_bytes() == 5000


def test_linux_without_proc_reports_neither_peak_nor_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(cpu, "_CLEAR", tmp_path / "clear_refs")
    memory, limits = cpu.CpuMemory(), resource.getrlimit(resource.RLIMIT_DATA)
    memory.set_memory_limit(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    assert memory.peak_bytes() is None
    assert memory.swaps
