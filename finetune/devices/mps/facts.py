"""Facts about Macs, available on any machine: memory, chip limits, known faults, MPS kernels."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from finetune.devices.host import Check
from finetune.errors import UsageError

# A chip and its memory in GB, which Apple counts as 2³⁰ bytes: ``m1-8gb``, ``MacBook Air M2 8 GB``.
_CHIP = re.compile(r"\b(m\d+)(?:[ -]*(pro|max|ultra))?(?![a-z0-9])", re.IGNORECASE)
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+)[ -]*g(?:i?b)?\b", re.IGNORECASE)
# Memory used by macOS and its programs. Calibrated together with the estimates for Macs
# (finetune/batch_finder/estimate.py). It limits Macs with up to 12 GB, Metal limits larger ones.
_HELD_BYTES = int(4.2 * 2**30)

Status = Literal["native", "composite", "missing"]
_COMPOSITES = {
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}

# The maximum tokens in a batch with correct gradients on M1 and M2, including PyTorch 2.14: sums of
# 32,767 products read beyond their operands (pytorch#177116, #195163). 64 examples of 512 tokens
# are 2 tokens too many.
_MAX_TOKENS = 32_766


def generation(chip: str) -> int | None:
    """Return the 1 of ``Apple M1 Pro`` or ``m1-pro``, or None."""
    match = re.search(r"\bm(\d+)\b", chip, re.IGNORECASE)
    return int(match[1]) if match else None


def max_tokens(chip: str) -> int | None:
    """Return the maximum tokens in a batch with correct results. Treat unknown chips as M1."""
    return _MAX_TOKENS if generation(chip) in (None, 1, 2) else None


@dataclass(frozen=True)
class Mac:
    """A Mac with a name such as ``m1-8gb``. Training can use up to ``limit_bytes``."""

    name: str
    memory_bytes: int
    chip: str = ""
    limit_bytes: int | None = None

    @property
    def recommended_bytes(self) -> int:
        """The limit that Metal recommends for the GPU memory of a process.

        Two thirds, or three quarters above 36 GiB, according to logs of Macs with 8 to 96 GiB
        (pytorch#105839, #130112, llama.cpp#5206, #3213). Newer versions of macOS recommend a larger
        part of large memories.
        """
        return int(self.memory_bytes * (2 / 3 if self.memory_bytes <= 36 * 2**30 else 3 / 4))

    @property
    def budget_bytes(self) -> int:
        """Memory for training before the machine swaps. On small Macs, less than recommended."""
        free_bytes = max(0, min(self.recommended_bytes, self.memory_bytes - _HELD_BYTES))
        return free_bytes if self.limit_bytes is None else min(free_bytes, self.limit_bytes)


def find_mac(name: str) -> Mac:
    """Parse a name such as ``m1-8gb`` or ``MacBook Pro M4 Max, 128 GB``."""
    name = name.replace("_", "-")
    match, memory = _CHIP.search(name), _MEMORY.search(name)
    if not match or not memory:
        raise UsageError(
            f"unknown Mac {name}",
            remedy="write a chip and its memory, such as m1-8gb or m4-max-64gb",
        )
    chip = "-".join(part.lower() for part in match.groups() if part)
    return Mac(f"{chip}-{memory[1]}gb", int(memory[1]) * 2**30, chip)


def known_faults(*, torch_version: str, macos: str, chip: int | None) -> Iterator[Check]:
    """Yield a check for each row of ``known_faults.yaml`` that affects a Mac. None: unknown chip.

    Faults that need attention come first.
    """
    import yaml
    from packaging.specifiers import SpecifierSet

    text = (resources.files("finetune.devices.mps") / "known_faults.yaml").read_text("utf-8")
    for row in sorted(yaml.safe_load(text), key=lambda row: "avoided" in row):
        has_versions = all(
            SpecifierSet(row.get(name, "")).contains(version, prereleases=True)
            for name, version in (("torch", torch_version), ("macos", macos))
        )
        if not has_versions or chip not in (None, *row.get("chips", [chip])):
            continue
        effect, link = row["effect"], row["link"]
        if "avoided" in row:
            yield Check("known_fault", "ok", f"{effect}; {row['avoided']}: {link}")
        else:
            yield Check("known_fault", "warning", f"{effect}: {link}", row.get("remedy", ""))


def status_of(name: str) -> Status:
    """Return how MPS runs an operator: with a kernel, as a composite of others, or not at all."""
    return _statuses().get(name.removeprefix("aten::"), "missing")


@functools.cache
def _statuses() -> dict[str, Status]:
    """Return the status of each operator, from the list in PyTorch wheels."""
    import yaml

    packaged = resources.files("torchgen") / "packaged" / "ATen" / "native"
    # libyaml parses the 16,000 lines in 0.1 s, ten times as fast as the Python parser.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (packaged / "native_functions.yaml").read_text("utf-8")
    entries: list[dict[str, Any]] = yaml.load(text, Loader=loader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}

    def status(entry: dict[str, Any]) -> Status:
        # A structured operator runs the kernel of its out variant.
        if delegate := entry.get("structured_delegate"):
            return status(by_name[delegate])
        keys = {key.strip() for listed in entry.get("dispatch", {}) for key in listed.split(",")}
        if "MPS" in keys:
            return "native"
        return "composite" if not keys or keys & _COMPOSITES else "missing"

    statuses = {name: status(entry) for name, entry in by_name.items()}
    for entry in entries:
        for variant in entry.get("autogen", "").split(","):
            # Generated variants call the original operator.
            statuses.setdefault(variant.strip(), "composite")
    return statuses
