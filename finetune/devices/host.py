"""The machine: its CPU, memory, system and environment variables, without torch."""

import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

# All supported PyTorch versions require this for MPS (pytorch#162921).
OLDEST_MACOS = 14
MACOS_REMEDY = "update macOS in its settings, under Software Update"
ROSETTA_REMEDY = (
    "in the Get Info window of the terminal app, untick Open using Rosetta, then install a Python "
    "for arm64; with conda: CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11, then "
    "conda activate finetune && conda config --env --set subdir osx-arm64"
)
# CPU flags of instructions that PyTorch uses: AVX-512 and AMX on Intel and AMD, bfmmla on Arm.
_LINUX_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
# Parameters of mallopt(3) in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_KEPT_BYTES = 2**30
# Fraction of memory left to other programs. Memory is short if less than half of it is free.
_RESERVE_SHARE = 0.05
# Systems swap single pages at any time. Growth above this size is treated as swapping.
_MAX_SWAP_GROWTH_BYTES = 128 * 2**20
# The index of ri_phys_footprint in rusage_info_v0, and a sufficient size (macOS, sys/resource.h).
_FOOTPRINT_INDEX, _USAGE_NUMBERS = 9, 64
# Twice the weights of BERT-base, their gradients and the two moments of AdamW, in fp32, because
# activations take about as much. On disk, a run has up to two checkpoints.
BERT_BASE_BYTES = 2 * 110_000_000 * 4 * 4

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
PREFER_METAL = "PYTORCH_MPS_PREFER_METAL"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it rejects allocations. PyTorch itself reports invalid values.
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULT_HIGH = 1.7


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, because clearing new pages takes 10% of each step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAX_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Make glibc return freed memory to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def limit_kernel_cache() -> None:
    """Make oneDNN keep few kernels: it keeps one per shape, and request batches have many."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def reduce_gc_frequency() -> None:
    """Run the garbage collector less often, because it takes a second for a million objects."""
    gc.set_threshold(50_000, 100)


def read_sysctl(name: str) -> str | None:
    """Read a macOS kernel value, such as ``hw.optional.arm64``, or return None."""
    command = ["/usr/sbin/sysctl", "-n", name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else None


def is_mac() -> bool:
    """Return whether the system is macOS."""
    return platform.system() == "Darwin"


def may_have_gpu() -> bool:
    """Return whether PyTorch might find a GPU, without importing it. True if unsure."""
    return is_mac() or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def can_fork() -> bool:
    """Return whether a process can fork after importing PyTorch, before using a device.

    On macOS, Metal and Accelerate abort or hang in a forked process (python/cpython#77906).
    """
    return not is_mac()


def is_under_rosetta() -> bool:
    """Return whether this Python runs as an Intel program on a Mac with Apple silicon."""
    return is_mac() and read_sysctl("sysctl.proc_translated") == "1"


def macos_version() -> str:
    """Return the macOS version, such as ``14.5``, or "" on other systems."""
    if not is_mac():
        return ""
    # A Python built for an older macOS reports 10.16 or 16.0 (python/cpython#135675).
    return read_sysctl("kern.osproductversion") or platform.mac_ver()[0]


def macos_major() -> int:
    """Return the macOS major version, such as 14, or 0 on other systems."""
    return int(macos_version().partition(".")[0] or 0)


def cpu_name() -> str:
    """Return the CPU name, such as ``Apple M1``, or "" if unknown."""
    if is_mac():
        return read_sysctl("machdep.cpu.brand_string") or ""
    return _read_cpuinfo().get("model name", "")


def bf16_instructions() -> list[str]:
    """Return the system names of the CPU's bf16 instruction sets."""
    if is_mac():
        return ["FEAT_BF16"] if read_sysctl("hw.optional.arm.FEAT_BF16") == "1" else []
    cpu = _read_cpuinfo()
    # /proc/cpuinfo lists flags on x86, and features on Arm.
    flags = f"{cpu.get('flags')} {cpu.get('Features')}".split()
    return [flag for flag in _LINUX_BF16_FLAGS if flag in flags]


def _read_cpuinfo() -> dict[str, str]:
    """Read /proc/cpuinfo for the first core, or return {} without /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def gibibytes(size_bytes: int) -> str:
    """Format a size, such as ``23.4 GiB``."""
    return f"{size_bytes / 2**30:.1f} GiB"


class GroupLimit(NamedTuple):
    """Memory limit and use of a Linux control group, without droppable file cache."""

    limit_bytes: int
    used_bytes: int


def group_limits(
    *, process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[GroupLimit]:
    """Yield the memory limits of this process's control group and its parent groups."""
    if not process.is_file():
        return
    path = re.search(r"^0::/(.*)$", process.read_text(encoding="utf-8"), re.MULTILINE)
    if path is None:
        return
    group = root / path[1]
    if ".." in path[1] or not group.is_dir():
        group = root  # in a container, the group of the container
    while group.is_relative_to(root):
        # memory.high slows a group down long before memory.max kills.
        files = [group / name for name in ("memory.max", "memory.high")]
        texts = [file.read_text().strip() for file in files if file.is_file()]
        if limits := [int(text) for text in texts if text != "max"]:
            used = (group / "memory.stat").read_text().split()
            droppable_bytes = int(used[used.index("inactive_file") + 1])
            used_bytes = int((group / "memory.current").read_text())
            yield GroupLimit(min(limits), used_bytes - droppable_bytes)
        group = group.parent


def available_bytes() -> int:
    """Return the free memory, minus a reserve of 5%."""
    memory, share = psutil.virtual_memory(), 1 - _RESERVE_SHARE
    spare = [memory.available - memory.total * _RESERVE_SHARE]
    spare += [group.limit_bytes * share - group.used_bytes for group in group_limits()]
    return max(0, int(min(spare)))


def process_bytes(process_id: int) -> int:
    """Return the memory that a process uses, or 0 if it ended."""
    # On macOS the footprint, because resident memory excludes most GPU tensors.
    if is_mac():
        usage = (ctypes.c_uint64 * _USAGE_NUMBERS)()
        library = ctypes.CDLL(None)
        has_ended = library.proc_pid_rusage(process_id, 0, ctypes.byref(usage)) != 0
        return 0 if has_ended else int(usage[_FOOTPRINT_INDEX])
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def why_short(*, swapped_bytes: int) -> str | None:
    """Return the reason why memory is short, or None. ``swapped_bytes`` were swapped before."""
    memory = psutil.virtual_memory()
    if memory.available < memory.total * _RESERVE_SHARE / 2:
        return f"the machine has {gibibytes(memory.available)} of memory left"
    growth_bytes = psutil.swap_memory().used - swapped_bytes
    is_swapping = growth_bytes > _MAX_SWAP_GROWTH_BYTES
    return f"the machine swapped {gibibytes(growth_bytes)}" if is_swapping else None


@dataclass(frozen=True)
class Check:
    """One line of ``finetune doctor``. The status is ``failure`` if something can't work."""

    name: str
    status: Literal["ok", "n/a", "warning", "failure"]
    finding: str
    remedy: str = ""

    @classmethod
    def warn_unless(cls, is_fine: bool, name: str, finding: str, remedy: str) -> "Check":
        """Create a check that is ok or a warning."""
        return cls(name, "ok", finding) if is_fine else cls(name, "warning", finding, remedy)


def high_ratio() -> float:
    """Return the factor of the recommended memory that PyTorch can use. 0 means no limit."""
    try:
        return float(os.environ.get(HIGH, _DEFAULT_HIGH))
    except ValueError:
        return 0.0


def check_variables() -> Iterator[Check]:
    """Yield a check of each variable that makes a Mac's GPU slow or unsafe."""
    effects = {
        HIGH: ("mps_watermarks", "lets a Mac swap until it freezes (pytorch#79840)"),
        FALLBACK: ("mps_fallback", "hides operators that run slowly on the CPU"),
        PREFER_METAL: ("mps_prefer_metal", "slows matrix products 6 to 10 times (pytorch#198182)"),
    }
    for variable, (name, effect) in effects.items():
        value = os.environ.get(variable, "")
        is_fine = high_ratio() > 0 if variable == HIGH else value in ("", "0")
        finding = f"{variable}={value}" + ("" if is_fine else f" {effect}")
        yield Check.warn_unless(is_fine, name, finding, f"unset {variable}")


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep an idle Mac awake, even while the run is saved after Ctrl-C."""
    program = shutil.which("caffeinate") if is_mac() else None
    if program is None:
        yield
        return
    # caffeinate exits with this process. In its own session, Ctrl-C doesn't reach it.
    command = [program, "-i", "-w", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield
        finally:
            process.terminate()
