"""Apple's chips, and how much of a Mac's memory training may have."""

import re
from dataclasses import dataclass

from finetune.errors import UsageError

# Memory sizes that Apple has sold with each chip, in GB, which Apple counts as 2³⁰ bytes.
CHIPS: dict[str, tuple[int, ...]] = {
    "m1": (8, 16),
    "m1-pro": (16, 32),
    "m1-max": (32, 64),
    "m1-ultra": (64, 128),
    "m2": (8, 16, 24),
    "m2-pro": (16, 32),
    "m2-max": (32, 64, 96),
    "m2-ultra": (64, 128, 192),
    "m3": (8, 16, 24),
    "m3-pro": (18, 36),
    "m3-max": (36, 48, 64, 96, 128),
    "m3-ultra": (96, 256, 512),
    "m4": (8, 16, 24, 32),
    "m4-pro": (24, 48, 64),
    "m4-max": (36, 48, 64, 128),
    "m5": (16, 24, 32),
    "m5-pro": (24, 48, 64),
    "m5-max": (36, 48, 64, 128),
}

# What macOS and its usual programs hold: a guess, and part of what memory estimates for Macs are
# calibrated by (finetune/batch_finder/calibration.json).
_HELD_BYTES = 3 * 2**30

_LARGEST_SMALL_MEMORY_BYTES = 36 * 2**30


@dataclass(frozen=True)
class Mac:
    """A Mac as far as training's memory goes.

    Args:
        name: Chip and memory, such as ``m1-8gb``.
        memory_bytes: Of the machine, shared by processor and GPU.
    """

    name: str
    memory_bytes: int

    @property
    def recommended_bytes(self) -> int:
        """What Metal recommends that a process's GPU memory stays below.

        Two thirds, and three quarters above 36 GiB. So logs of Macs with 8, 16, 18, 24, 32, 64 and
        96 GiB show it (pytorch#105839, #130112, llama.cpp#5206, #3213); newer systems recommend
        more of large memories: 37.4 of 48 GiB, 107.5 of 128.
        """
        if self.memory_bytes <= _LARGEST_SMALL_MEMORY_BYTES:
            return self.memory_bytes * 2 // 3
        return self.memory_bytes * 3 // 4

    @property
    def budget_bytes(self) -> int:
        """What training may take before the machine swaps; on small Macs less than recommended."""
        return max(0, min(self.recommended_bytes, self.memory_bytes - _HELD_BYTES))


MACS = {
    f"{chip}-{size}gb": Mac(f"{chip}-{size}gb", size * 2**30)
    for chip, sizes in CHIPS.items()
    for size in sizes
}


def find_mac(name: str) -> Mac:
    """Return the Mac of a name such as ``m1-8gb`` or ``M4-Max-128GB``.

    Raises:
        UsageError: If Apple has sold no such Mac.
    """
    mac = MACS.get(name.lower())
    if mac is None:
        chip = re.sub(r"-\d*(gb)?$", "", name.lower())
        sizes = [known for known in MACS if known.rpartition("-")[0] == chip]
        raise UsageError(
            f"no Mac is known as {name}",
            remedy=f"choose {', '.join(sizes)}"
            if sizes
            else f"name a chip and its memory, such as m1-8gb; the chips are {', '.join(CHIPS)}",
        )
    return mac
