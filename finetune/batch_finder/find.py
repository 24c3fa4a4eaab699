"""The largest batch size and the fastest of one case on one device, searched for or remembered."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from finetune.batch_finder.case import Case
from finetune.batch_finder.outcomes import Outcome, Probe
from finetune.batch_finder.prober import WORKER, Prober
from finetune.batch_finder.search import Found, search
from finetune.devices.base import Device
from finetune.files import read_json, write_json

# What an answer depends on: this package decides what it recommends.
_PACKAGES = ("finetune-mps", "torch", "transformers", "accelerate")


@dataclass(frozen=True)
class Bounds:
    """Where a search ends.

    Args:
        limit: Largest size worth trying, in rows.
        first: Size to begin with; None for a small one.
        memory_limit_bytes: The most memory that the user allows; None for as much as there is.
        time_limit_seconds: Time for the search, the start of its first process included.
    """

    limit: int
    first: int | None
    memory_limit_bytes: int | None
    time_limit_seconds: float


@dataclass(frozen=True)
class Answer:
    """What was found, and under which budget.

    Args:
        found: The sizes.
        budget_bytes: Memory that a probe might hold.
        seconds: Wall time of all that it took to find them.
        is_remembered: Whether an earlier search found it, and one probe confirmed it now.
    """

    found: Found
    budget_bytes: int
    seconds: float
    is_remembered: bool

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory at the largest verified size."""
        peaks = [
            one.peak_bytes
            for one in self.found.probes
            if one.verdict == "fits" and one.batch_size == self.found.max_verified
        ]
        return peaks[-1] if peaks else None


def find_batch(
    case: Case,
    *,
    device: Device,
    bounds: Bounds,
    memory: Path | None,
    on_probe: "OnProbe",
    worker: str = WORKER,
) -> Answer:
    """Search for a case's batch sizes, or confirm what an earlier search found.

    Args:
        case: What is trained, on which device.
        device: That device. The parent does not touch it: children train.
        bounds: Where the search ends.
        memory: Folder with the answers of earlier searches; None to search in any case.
        on_probe: Is told of each probe.
        worker: Name of the module that the children run.

    Raises:
        BatchDoesNotFit: If not even one row fits.
        ProbeFailed: If a probe failed for another reason than memory.
        ModelUnsupported: If the case asks for a part of a model that can't be cut in two.
    """
    started = time.perf_counter()
    file = None if memory is None else memory / f"{_key(case, device, bounds)}.json"
    with Prober(
        case,
        device=device,
        limit_bytes=bounds.memory_limit_bytes,
        timeout_seconds=bounds.time_limit_seconds,
        worker=worker,
    ) as prober:
        verify = _reporting(prober.probe_afresh, on_probe)
        budget_bytes = prober.budget_bytes()
        remembered = None if file is None else _read(file)
        if remembered is not None:
            outcome = verify(remembered.recommended)
            if outcome.verdict == "fits" and not outcome.is_strained:
                seconds = time.perf_counter() - started
                return Answer(remembered, budget_bytes, seconds, is_remembered=True)
        found = search(
            _reporting(prober.probe, on_probe),
            verify=verify,
            budget_bytes=budget_bytes,
            limit=bounds.limit,
            first=bounds.first,
            time_limit_seconds=bounds.time_limit_seconds - (time.perf_counter() - started),
            # Where no one can tell the peak from inside, nothing refuses memory either.
            slows_down=device.memory.swaps,
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, dataclasses.asdict(found))
    return Answer(found, budget_bytes, time.perf_counter() - started, is_remembered=False)


OnProbe = Callable[[Outcome], None]


def _reporting(probe: Probe, on_probe: OnProbe) -> Probe:
    def probe_and_report(batch_size: int) -> Outcome:
        outcome = probe(batch_size)
        on_probe(outcome)
        return outcome

    return probe_and_report


def _key(case: Case, device: Device, bounds: Bounds) -> str:
    """Return a key of all that the answer depends on."""
    ingredients = [
        case.to_json(),
        device.description,
        *(f"{package} {version(package)}" for package in _PACKAGES),
        json.dumps(dataclasses.asdict(bounds), sort_keys=True),
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
