"""The largest batch size and the fastest of one case on one device, searched for or cached."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from finetune.batch_finder.case import Case
from finetune.batch_finder.outcomes import Outcome, Probe
from finetune.batch_finder.prober import Prober
from finetune.batch_finder.search import Found, search
from finetune.devices.base import Device
from finetune.files import read_json, write_json

OnProbe = Callable[[Outcome], None]

# What a result depends on; this package decides what it recommends.
_PACKAGES = ("finetune-mps", "torch", "transformers", "accelerate")
# Free memory is never quite the same twice. A budget larger by this is worth another search.
_MORE_BUDGET = 1.05


@dataclass(frozen=True)
class Bounds:
    """Where a search ends.

    Args:
        limit: Largest batch size worth trying.
        first: Batch size to begin with; None for a small one.
        memory_limit_bytes: The most memory that the user allows; None for as much as there is.
        time_limit_seconds: Time for the search, the start of its first process included.
    """

    limit: int
    first: int | None
    memory_limit_bytes: int | None
    time_limit_seconds: float

    def clamp(self, max_examples: int | None) -> "Bounds":
        """Return bounds of no more than some examples, None for any number."""
        if max_examples is None:
            return self
        limit = min(self.limit, max_examples)
        return replace(self, limit=limit, first=self.first and min(self.first, limit))


def find_case(
    case: Case, *, device: Device, bounds: Bounds, cache: Path | None, on_probe: OnProbe
) -> Found:
    """Search for a case's batch sizes, or confirm by one probe what an earlier search found.

    With more memory than it had then, the search begins where the earlier one ended.

    Args:
        case: What is trained, on which device.
        device: That device. Only child processes use it.
        bounds: Where the search ends.
        cache: Folder of the results of earlier searches; None to search in any case.
        on_probe: Is called with the outcome of each probe.

    Raises:
        BatchDoesNotFit: If not even one example fits.
        ProbeFailed: If a probe failed for another reason than memory.
        ModelUnsupported: If the model can't be split into the case's part.
    """
    started = time.perf_counter()
    file = None if cache is None else cache / f"{_key(case, device, bounds)}.json"
    cached = None if file is None else _read(file)
    with Prober(
        case,
        device=device,
        limit_bytes=bounds.memory_limit_bytes,
        timeout_seconds=bounds.time_limit_seconds,
    ) as prober:
        probe, verify = (_reporting(one, on_probe) for one in (prober.probe, prober.probe_afresh))
        budget_bytes = prober.budget_bytes()
        first = bounds.first
        if cached and _may_grow(cached, budget_bytes):
            first = cached.max_verified
        elif cached and _is_confirmed(verify(cached.recommended)):
            return replace(cached, budget_bytes=budget_bytes)
        found = search(
            probe,
            verify=verify,
            budget_bytes=budget_bytes,
            limit=bounds.limit,
            first=first,
            time_limit_seconds=bounds.time_limit_seconds - (time.perf_counter() - started),
            slows_down=device.memory.swaps,
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(found))
    return found


def _may_grow(cached: Found, budget_bytes: int) -> bool:
    """Return whether memory ended the earlier search, and there is more of it now."""
    was_short = cached.first_failed is not None or cached.recommended < cached.fastest
    return was_short and budget_bytes > _MORE_BUDGET * cached.budget_bytes


def _is_confirmed(outcome: Outcome) -> bool:
    return outcome.verdict == "fits" and not outcome.is_strained


def _reporting(probe: Probe, on_probe: OnProbe) -> Probe:
    def probe_and_report(batch_size: int) -> Outcome:
        outcome = probe(batch_size)
        on_probe(outcome)
        return outcome

    return probe_and_report


def _key(case: Case, device: Device, bounds: Bounds) -> str:
    """Return a key of all that a result depends on but the budget."""
    ingredients = [
        case.to_json(),
        device.description,
        *(f"{package} {version(package)}" for package in _PACKAGES),
        json.dumps(asdict(bounds), sort_keys=True),
    ]
    return hashlib.sha256("\n".join(ingredients).encode()).hexdigest()


def _read(file: Path) -> Found | None:
    """Return what an earlier search wrote, or None if there is nothing that can be read."""
    try:
        fields = read_json(file)
        probes = tuple(Outcome(**outcome) for outcome in fields.pop("probes"))
        return Found(**fields, probes=probes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
