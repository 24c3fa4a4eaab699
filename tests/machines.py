"""Simulated machines, which replace functions of libraries that the package calls.

These are ``platform``, ``sysconfig`` and ``subprocess`` of the standard library, ``/proc`` of
Linux, ``psutil``, and the PyTorch backends ``torch.mps`` and ``torch.cuda``. On a GPU that
works, ``torch.ones`` allocates CPU memory.
"""

import platform
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

REAL_ONES = torch.ones
REAL_READ_TEXT = Path.read_text
REAL_RUN = subprocess.run

# Errors on GitHub-hosted runners (actions/runner-images#9918 and #11899).
VIRTUAL_MAC_TEXTS = [
    "MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: "
    "7.93 GB). Tried to allocate 256 bytes on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure).",
    "MPS backend out of memory (MPS allocated: 1024.00 MB). Tried to allocate 256 bytes on shared "
    "pool.",
]


@dataclass(frozen=True)
class Machine:
    """A computer, as reported to Python and PyTorch.

    Args:
        system: The result of ``platform.system``.
        processor: The result of ``platform.machine``.
        macos: The version from ``platform.mac_ver``.
        python_platform: The result of ``sysconfig.get_platform``.
        sysctls: Values of the macOS kernel, by name.
        cpuinfo: Content of ``/proc/cpuinfo`` on Linux.
        memory_gib: The total memory.
        is_mps_available: Whether PyTorch reports MPS as available.
        recommended_gib: The recommended working set of the GPU.
        cuda: The CUDA version that PyTorch is built for, or None.
        gpus: Name and free GiB of each NVIDIA GPU, of 139.8 GiB each.
        failure: The error of the first operation on the GPU.
    """

    system: str = "Linux"
    processor: str = "x86_64"
    macos: str = ""
    python_platform: str = ""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    cpuinfo: str = ""
    memory_gib: float = 16.0
    is_mps_available: bool = False
    recommended_gib: float = 0.0
    cuda: str | None = None
    gpus: tuple[tuple[str, float], ...] = ()
    failure: str | None = None


def a_mac(
    *, chip: str = "Apple M2", macos: str = "14.5", memory_gib: float = 16.0, **changes: Any
) -> Machine:
    """Return a Mac with Apple silicon and a working GPU, with these changes."""
    sysctls = {
        "hw.optional.arm64": "1",
        "kern.osproductversion": macos,
        "machdep.cpu.brand_string": chip,
    } | ({} if chip.startswith("Apple M1") else {"hw.optional.arm.FEAT_BF16": "1"})
    mac = Machine(
        system="Darwin",
        processor="arm64",
        macos=macos,
        python_platform="macosx-11.0-arm64",
        sysctls=sysctls,
        memory_gib=memory_gib,
        is_mps_available=True,
        recommended_gib=memory_gib * (0.75 if memory_gib > 36 else 2 / 3),
    )
    return replace(mac, **changes)


INTEL_MAC = Machine(
    system="Darwin",
    macos="13.6",
    python_platform="macosx-10.9-x86_64",
    sysctls={
        "machdep.cpu.brand_string": "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz",
        "kern.osproductversion": "13.6",
    },
)
# The Intel Python of conda was built for an old macOS and reports at most version 10.16.
ROSETTA = Machine(
    system="Darwin",
    macos="10.16",
    python_platform="macosx-10.9-x86_64",
    sysctls={
        "sysctl.proc_translated": "1",
        "hw.optional.arm64": "1",
        "machdep.cpu.brand_string": "Apple M1",
        "kern.osproductversion": "14.5",
    },
)
LINUX = Machine(
    cpuinfo="processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu avx2\n\n"
    "processor\t: 1\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu avx2\n"
)
LINUX_WITH_CUDA = Machine(
    cpuinfo="model name\t: Intel(R) Xeon(R) Platinum 8480C\nflags\t: avx512_bf16 amx_bf16 amx_tile",
    cuda="13.0",
    gpus=(("NVIDIA H200", 139.1),),
)
MACHINES = {
    "an Intel Mac": INTEL_MAC,
    "Rosetta": ROSETTA,
    "macOS 12.3": a_mac(macos="12.3", is_mps_available=False),
    "macOS 13": a_mac(macos="13.6", is_mps_available=False),
    "macOS 14": a_mac(macos="14.5"),
    "macOS 26": a_mac(macos="26.0"),
    "M1 with 8 GB": a_mac(chip="Apple M1", macos="15.6", memory_gib=8.0),
    "M4 Max": a_mac(chip="Apple M4 Max", macos="15.6", memory_gib=128.0),
    "a virtual Mac": a_mac(
        chip="Apple M1 (Virtual)", macos="15.6", memory_gib=7.0, failure=VIRTUAL_MAC_TEXTS[0]
    ),
    "Linux with CUDA": LINUX_WITH_CUDA,
    "Linux without a GPU": LINUX,
}


def simulate(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Simulate a machine in this process."""
    _simulate_system(machine, patch)
    patch.setattr(torch, "ones", _ones(machine))
    patch.setattr(torch.backends.mps, "is_available", lambda: machine.is_mps_available)
    recommended_bytes = int(machine.recommended_gib * 2**30)
    patch.setattr(torch.mps, "recommended_max_memory", lambda: recommended_bytes)
    patch.setattr(torch.version, "cuda", machine.cuda)
    total_bytes = 150_110_000_000
    patch.setattr(torch.cuda, "device_count", lambda: len(machine.gpus))
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index=0: SimpleNamespace(
            name=machine.gpus[index][0], total_memory=total_bytes, major=9, minor=0
        ),
    )
    patch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda index=0: (int(machine.gpus[index][1] * 2**30), total_bytes),
    )


def _simulate_system(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path == Path("/proc/self/cgroup"):
            return ""
        if path != Path("/proc/cpuinfo"):
            return REAL_READ_TEXT(path, *arguments, **options)
        if not machine.cpuinfo:
            raise FileNotFoundError(path)
        return machine.cpuinfo

    total_bytes = int(machine.memory_gib * 2**30)
    memory = SimpleNamespace(total=total_bytes, available=total_bytes // 2)
    patch.setattr(platform, "system", lambda: machine.system)
    patch.setattr(platform, "machine", lambda: machine.processor)
    patch.setattr(platform, "platform", lambda: f"{machine.system}-{machine.processor}")
    patch.setattr(platform, "mac_ver", lambda: (machine.macos, ("", "", ""), machine.processor))
    patch.setattr(sysconfig, "get_platform", lambda: machine.python_platform)
    patch.setattr(subprocess, "run", _run(machine))
    patch.setattr(Path, "read_text", read_text)
    patch.setattr(psutil, "virtual_memory", lambda: memory)


def _run(machine: Machine) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Replace ``subprocess.run`` for calls of ``sysctl``."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != "/usr/sbin/sysctl":
            return REAL_RUN(command, **options)
        _, option, name = command
        assert (machine.system, option) == ("Darwin", "-n")
        if name in machine.sysctls:
            return subprocess.CompletedProcess(command, 0, f"{machine.sysctls[name]}\n", "")
        return subprocess.CompletedProcess(command, 1, "", f"sysctl: unknown oid '{name}'\n")

    return run


def _ones(machine: Machine) -> Callable[..., torch.Tensor]:
    def ones(*size: int, device: torch.device | None = None, **options: Any) -> torch.Tensor:
        if device is not None and device.type != "cpu" and machine.failure is not None:
            raise RuntimeError(machine.failure)
        return REAL_ONES(*size, **options)

    return ones
