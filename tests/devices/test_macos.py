import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.devices import macos

FOOTPRINT_BYTES = 62_700_000_000


@pytest.fixture
def _pretend_libproc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with one process, 7, that writes the 96 bytes of rusage_info_v0."""

    def proc_pid_rusage(process_id: int, version: int, pointer: Any) -> int:
        if process_id != 7:
            return -1
        assert version == 0
        numbers = [0] * 12
        numbers[8], numbers[9] = 4_100_000_000, FOOTPRINT_BYTES  # resident size, footprint
        usage = (ctypes.c_uint64 * 12)(*numbers)
        ctypes.memmove(pointer, usage, ctypes.sizeof(usage))
        return 0

    library = SimpleNamespace(proc_pid_rusage=proc_pid_rusage)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


@pytest.mark.usefixtures("_pretend_libproc")
def test_the_footprint_is_read_and_not_the_resident_size() -> None:
    assert macos.footprint_bytes(7) == FOOTPRINT_BYTES


@pytest.mark.usefixtures("_pretend_libproc")
def test_a_process_that_is_not_there_has_no_footprint() -> None:
    with pytest.raises(ProcessLookupError):
        macos.footprint_bytes(8)


@pytest.mark.parametrize("level", [1, 2, 4])
def test_the_pressure_is_the_kernels_level(pretend_mac: Callable[..., None], level: int) -> None:
    pretend_mac(sysctls={"kern.memorystatus_vm_pressure_level": str(level)})
    assert macos.pressure_level() == level


def test_a_mac_that_does_not_tell_is_under_no_pressure(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(sysctls={})
    assert macos.pressure_level() == 1
