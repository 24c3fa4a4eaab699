"""macOS's counts of memory, of one process and of the whole Mac."""

import ctypes

from finetune.devices.host import read_sysctl

# The position of ri_phys_footprint among the 64-bit numbers of rusage_info_v0, after the two of
# ri_uuid, and room for what a later system may write behind it (sys/resource.h).
_FOOTPRINT_INDEX = 9
_USAGE_NUMBERS = 64
_USAGE_VERSION = 0


def footprint_bytes(process_id: int) -> int:
    """Return the memory that a process keeps the Mac from using for others.

    Resident memory leaves out most of what a GPU's tensors take: 4.1 GB beside a footprint of
    62.7 GB has been seen.

    Raises:
        ProcessLookupError: If there is no such process.
    """
    usage = (ctypes.c_uint64 * _USAGE_NUMBERS)()
    if ctypes.CDLL(None).proc_pid_rusage(process_id, _USAGE_VERSION, ctypes.byref(usage)) != 0:
        raise ProcessLookupError(process_id)
    return int(usage[_FOOTPRINT_INDEX])


def pressure_level() -> int:
    """Return how short of memory the Mac is: 1 for not at all, 2 for a warning, 4 for critical."""
    return int(read_sysctl("kern.memorystatus_vm_pressure_level") or 1)
