"""The machine's CPU and system, without torch."""

import ctypes
import gc
import platform
import subprocess
from pathlib import Path

# For MPS, from PyTorch 2.9 on, so all versions that are supported (pytorch#162921).
OLDEST_MACOS = 14
MACOS_REMEDY = "update macOS in its settings, under Software Update"
ROSETTA_REMEDY = (
    "untick Open using Rosetta in the terminal's Get Info, and install a Python for arm64; with "
    "conda: CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11, then conda activate "
    "finetune && conda config --env --set subdir osx-arm64"
)
# Flags of instructions that PyTorch uses: AVX-512 and AMX on Intel and AMD, bfmmla on Arm.
_LINUX_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
# Parameters of mallopt(3) in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later tensors: clearing pages takes a tenth of a step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAX_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Make the C library return freed memory to the system, if it is glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def reduce_gc_frequency() -> None:
    """Let Python collect garbage less often: a million imported objects cost it a second."""
    gc.set_threshold(50_000, 100)


def read_sysctl(name: str) -> str | None:
    """Return a value of the macOS kernel, such as ``hw.optional.arm64``, or None."""
    command = ["/usr/sbin/sysctl", "-n", name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else None


def is_mac() -> bool:
    """Return whether the system is macOS."""
    return platform.system() == "Darwin"


def is_under_rosetta() -> bool:
    """Return whether this Python runs as a program for Intel on a Mac with Apple silicon."""
    return is_mac() and read_sysctl("sysctl.proc_translated") == "1"


def macos_version() -> str:
    """Return the version of macOS, such as ``14.5``; empty on other systems."""
    if not is_mac():
        return ""
    # A Python built for an older macOS reports 10.16 or 16.0 (python/cpython#135675).
    return read_sysctl("kern.osproductversion") or platform.mac_ver()[0]


def macos_major() -> int:
    """Return the major version of macOS, such as 14; 0 on other systems."""
    return int(macos_version().partition(".")[0] or 0)


def cpu_name() -> str:
    """Return the name of the CPU, such as ``Apple M1``, or an empty string."""
    if is_mac():
        return read_sysctl("machdep.cpu.brand_string") or ""
    return _read_cpuinfo().get("model name", "")


def bf16_instructions() -> list[str]:
    """Return the CPU's instruction sets for bf16 by the system's names, maybe none."""
    if is_mac():
        name = "FEAT_BF16"
        return [name] if read_sysctl(f"hw.optional.arm.{name}") == "1" else []
    cpu = _read_cpuinfo()
    # Arm's CPUs have features in place of flags.
    flags = f"{cpu.get('flags')} {cpu.get('Features')}".split()
    return [flag for flag in _LINUX_BF16_FLAGS if flag in flags]


def _read_cpuinfo() -> dict[str, str]:
    """Return what /proc/cpuinfo reports for the first core, nothing if there is no /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def gibibytes(size_bytes: int) -> str:
    """Format a size, such as ``23.4 GiB``."""
    return f"{size_bytes / 2**30:.1f} GiB"
