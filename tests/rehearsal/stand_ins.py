"""Simulated machines, which report other hardware but compute with CPU tensors.

Read this file next to ``finetune/devices/mps/device.py``, ``cuda.py`` and ``host.py``. It replaces
the PyTorch and system functions that they call. ``machines.py`` contains the parts that other
tests also use.
"""

import ctypes
import errno
import os
import platform
import re
import resource
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from machines import LINUX, LINUX_WITH_CUDA, Machine, a_mac, simulate
from rehearsal.crashes import plant_crash

from finetune.devices.base import Device
from finetune.devices.cuda import CudaDevice
from finetune.devices.mps.device import MpsDevice

# Environment variable with the machine name, for the child processes of a command.
MACHINE = "REHEARSED_MACHINE"
CPU = torch.device("cpu")
# The export takes ten seconds, and doesn't depend on the device.
EXPORT = "export onnx"
# Steps that don't depend on the device. They are rehearsed on one Mac.
ANYWHERE = (
    EXPORT, "run --seeds 2", "run --folds 3", "compare", "report", "data check", "label", "serve",
)  # fmt: skip
# Steps that need a single process.
ALONE = (
    *ANYWHERE, "doctor", "doctor --parity", "predict a text", "predict a file", "data audit",
    "find-batch",
)  # fmt: skip
# Runs that other tests do on a CPU, and that don't depend on the kind of CPU.
_OTHER_RUNS = (
    "run --train-layers 2", "run --lora-rank 8", "run with few labels", "run without labels",
    "run with several labels", "run --long-texts windows", "kill and resume",
)  # fmt: skip
_ON_A_CPU = (*ANYWHERE, *_OTHER_RUNS, "predict a file")


@dataclass(frozen=True)
class Rehearsal:
    """A machine on which the commands are rehearsed, and the device that they should report.

    Args:
        machine: What the machine reports.
        device: The name of the device that ``--device auto`` selects.
        precisions: Names of the precisions that ``--precision auto`` may choose.
        parity: The 16-bit precisions in which ``doctor --parity`` runs first.
        hidden: Folders and files that the machine doesn't have.
        ranks: The number of processes of each run.
        left_out: Steps that are the same as on a different machine.
    """

    machine: Machine
    device: str = "cpu"
    precisions: tuple[str, ...] = ("fp32",)
    parity: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    ranks: int = 1
    left_out: tuple[str, ...] = _ON_A_CPU


_BF16_CPU = "model name\t: Intel(R) Xeon(R) Platinum 8480C\nflags\t: avx512_bf16 amx_bf16"
_MAC_8GB = a_mac(chip="Apple M1", macos="15.6", memory_gib=8.0)
_MAC_64GB = a_mac(chip="Apple M4 Max", macos="26.1", memory_gib=64.0)
_ARM = Machine(processor="aarch64", cpuinfo="processor\t: 0\nFeatures\t: fp asimd bf16\n")
# Linux has no such files in some sandboxes. Macs don't have them either.
_PROC = ("/proc",)
_NVIDIA = ("fp32", "bf16")
_TWO_GPUS = replace(LINUX_WITH_CUDA, gpus=2 * LINUX_WITH_CUDA.gpus)

_RANKS = (*ALONE, *_OTHER_RUNS, "run --batch-size auto")

REHEARSALS: Mapping[str, Rehearsal] = {
    "mac-8gb": Rehearsal(_MAC_8GB, "mps", hidden=_PROC, left_out=(EXPORT,)),
    "mac-64gb": Rehearsal(
        _MAC_64GB, "mps", ("bf16",), ("bf16", "fp16"), _PROC, left_out=ANYWHERE[1:]
    ),
    "nvidia": Rehearsal(LINUX_WITH_CUDA, "cuda", ("bf16",), left_out=ANYWHERE),
    "cpu-without-bf16": Rehearsal(LINUX),
    "cpu-with-bf16": Rehearsal(Machine(cpuinfo=_BF16_CPU), precisions=_NVIDIA),
    "arm-linux": Rehearsal(_ARM, precisions=_NVIDIA),
    "linux-without-proc": Rehearsal(Machine(), hidden=_PROC),
    "two-cpu-ranks": Rehearsal(LINUX, ranks=2, left_out=ALONE),
    "two-nvidia-ranks": Rehearsal(_TWO_GPUS, "cuda", ("bf16",), ranks=2, left_out=_RANKS),
}


def prepare() -> None:
    """Simulate the machine in the environment variable in this child process of a command."""
    # Libraries import other modules on a Mac.

    be_on(REHEARSALS[os.environ[MACHINE]])
    plant_crash()


def be_on(rehearsal: Rehearsal) -> None:
    """Simulate a machine in this process until it exits."""
    patch = pytest.MonkeyPatch()
    simulate(rehearsal.machine, patch)
    _hide_files(rehearsal.hidden, patch)
    if rehearsal.machine.system == "Darwin":
        _simulate_macos(patch)
    if rehearsal.device == "mps":
        _simulate_metal(patch)
    if rehearsal.device == "cuda":
        _simulate_cuda(patch)


def _hide_files(hidden: tuple[str, ...], patch: pytest.MonkeyPatch) -> None:
    """Hide these files from ``pathlib``. psutil still reads them."""

    def hide(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if not str(path).startswith(hidden):
                return method(path, *arguments, **options)
            if method.__name__ in ("exists", "is_file"):
                return False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

        return call

    if hidden:
        for name in ("exists", "is_file", "open"):
            patch.setattr(Path, name, hide(getattr(Path, name)))


def _simulate_macos(patch: pytest.MonkeyPatch) -> None:
    """Simulate the C library of macOS and its units."""
    real_library, real_usage = ctypes.CDLL, resource.getrusage

    def open_library(name: str | None, *arguments: Any, **options: Any) -> Any:
        if name is None:
            return SimpleNamespace(proc_pid_rusage=_write_footprint)
        return real_library(name, *arguments, **options)

    def usage(who: int) -> Any:
        peak_kilobytes = real_usage(who).ru_maxrss
        return SimpleNamespace(ru_maxrss=peak_kilobytes * 1024)  # macOS counts bytes

    patch.setattr(ctypes, "CDLL", open_library)
    patch.setattr(resource, "getrusage", usage)
    patch.setattr(platform, "libc_ver", lambda: ("", ""))


def _write_footprint(process_id: int, flavor: int, usage: Any) -> int:
    """Write the footprint of a process to the field that ``proc_pid_rusage`` uses on macOS."""
    try:
        resident_bytes = psutil.Process(process_id).memory_info().rss
    except psutil.NoSuchProcess:
        return -1
    ctypes.cast(usage, ctypes.POINTER(ctypes.c_uint64))[9] = resident_bytes
    return 0


def _simulate_metal(patch: pytest.MonkeyPatch) -> None:
    """Simulate the GPU of a Mac, with tensors in the memory of this process."""
    patch.setattr(MpsDevice, "torch_device", CPU)
    patch.setattr(torch.mps, "current_allocated_memory", _resident_bytes)
    patch.setattr(torch.mps, "driver_allocated_memory", _resident_bytes)
    patch.setattr(torch.mps, "set_per_process_memory_fraction", _expect_float)
    patch.setattr(torch.mps, "empty_cache", lambda: None)
    _count_memory(patch)


def _simulate_cuda(patch: pytest.MonkeyPatch) -> None:
    """Simulate an NVIDIA GPU per rank, without CUDA graphs."""
    patch.setattr(CudaDevice, "torch_device", CPU)
    patch.setattr(CudaDevice, "captures", False)
    patch.setattr(CudaDevice, "capture", Device.capture)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "memory_reserved", _resident_bytes)
    patch.setattr(torch.cuda, "set_per_process_memory_fraction", _expect_float)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(torch.cuda, "get_device_properties", _nvidia_properties)
    patch.setattr(torch.distributed, "new_group", _gloo_group(torch.distributed.new_group))
    _count_memory(patch)


def _nvidia_properties(device: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H200", total_memory=150_110_000_000, major=9, minor=0,
        uuid=f"GPU-{os.environ.get('LOCAL_RANK', device)}",
    )  # fmt: skip


def _gloo_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``new_group`` whose groups over NCCL reduce tensors of the CPU."""

    def make(*, backend: str) -> Any:
        assert backend == "nccl"
        return new_group(backend="gloo")

    return make


def _count_memory(patch: pytest.MonkeyPatch) -> None:
    """Count the memory of this process as the memory of its accelerator."""
    counted = {
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_allocated": _peak_bytes,
        "max_memory_reserved": _peak_bytes,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": lambda: None,
    }
    for name, count in counted.items():
        patch.setattr(torch.accelerator, name, count)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        match = re.search(r"VmHWM:\s+(\d+) kB", file.read())
    return int(match[1]) * 1024 if match else _resident_bytes()


def _reset_peak() -> None:
    if os.access("/proc/self/clear_refs", os.W_OK):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def _expect_float(fraction: float) -> None:
    assert isinstance(fraction, float)  # PyTorch rejects an int.


def write_caffeinate(folder: Path) -> None:
    """Write a stand-in for ``caffeinate``, which keeps a Mac awake while a process runs."""
    program = folder / "caffeinate"
    program.write_text("#!/bin/sh\nexec tail --pid=$3 -f /dev/null\n")
    program.chmod(stat.S_IRWXU)
