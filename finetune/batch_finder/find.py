"""The largest batch size and the fastest of one case on one device, searched for or cached."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from finetune import events
from finetune.batch_finder.case import Case
from finetune.batch_finder.child import Child
from finetune.batch_finder.outcomes import History, Outcome, Probe
from finetune.batch_finder.prober import Prober
from finetune.batch_finder.results import PartProbe
from finetune.batch_finder.search import Found, search
from finetune.devices.base import Device
from finetune.devices.host_memory import spare_bytes
from finetune.distributed.launch import read_launch
from finetune.files import keep_json

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
        memory_limit_bytes: The most that the user allows a process; None for as much as there is.
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


@dataclass(frozen=True)
class Finder:
    """Searches on one device, which only child processes use.

    Args:
        cache: Folder of the results of earlier searches; None to search in any case.
        emit: Receives each probe as an event.
        spares: Children that are started already; the first search takes them.
        probes: Those of all searches, in order.
    """

    device: Device
    bounds: Bounds
    cache: Path | None
    emit: events.Emit
    spares: list[Child] = field(default_factory=list)
    probes: list[PartProbe] = field(default_factory=list)

    def find(self, case: Case) -> Found:
        """Search for a case's batch sizes, or confirm by one probe what an earlier search found.

        No size is tried that the device computes wrongly. With more memory than an earlier search
        had, this one begins where that one ended.

        Raises:
            BatchDoesNotFit: If not even one example fits.
            ProbeFailed: If a probe failed for another reason than memory.
            ModelUnsupported: If the model can't be split into the case's part.
        """
        started = time.perf_counter()
        max_examples = self.device.shapes.max_examples(padded_length=case.padded_length)
        bounds = self.bounds.clamp(max_examples)
        file = self.cache and self.cache / f"{_key(case, self.device, bounds)}.json"
        cached = _read(file) if file else None
        with Prober(
            case,
            device=self.device,
            limit_bytes=self._limit_bytes(),
            timeout_seconds=bounds.time_limit_seconds,
            spares=self.spares,
        ) as prober:
            probe = partial(self._report, case, prober.probe)
            verify = partial(self._report, case, prober.probe_afresh)
            budget_bytes = prober.budget_bytes()
            first = bounds.first
            if cached and _may_grow(cached, budget_bytes):
                first = cached.max_verified
            elif cached:
                outcome = verify(cached.recommended)
                if outcome.verdict == "fits" and not outcome.is_strained:
                    return replace(cached, budget_bytes=budget_bytes)
            seconds_left = bounds.time_limit_seconds - (time.perf_counter() - started)
            slows_down = self.device.memory.swaps
            history = History(budget_bytes, bounds.limit, first, seconds_left, slows_down)
            found = search(probe, verify=verify, history=history)
        if file:
            keep_json(file, asdict(found))
        return found

    def _limit_bytes(self) -> int | None:
        """Return the most that a probe may hold: processes of one host divide the host's memory."""
        limit_bytes, processes = self.bounds.memory_limit_bytes, read_launch().local_world_size
        if processes == 1 or not self.device.memory.is_shared:
            return limit_bytes
        share_bytes = spare_bytes() // processes
        return share_bytes if limit_bytes is None else min(limit_bytes, share_bytes)

    def _report(self, case: Case, probe: Probe, batch_size: int) -> Outcome:
        outcome = probe(batch_size)
        self.probes.append(PartProbe(case.part, outcome))
        self.emit(outcome)
        return outcome


def _may_grow(cached: Found, budget_bytes: int) -> bool:
    """Return whether memory ended the earlier search, and there is more of it now."""
    return cached.is_short_of_memory and budget_bytes > _MORE_BUDGET * cached.budget_bytes


def _key(case: Case, device: Device, bounds: Bounds) -> str:
    """Return a key of all that a result depends on but the budget."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    limits = json.dumps(asdict(bounds), sort_keys=True)
    ingredients = "\n".join([case.to_json(), device.description, *versions, limits])
    return hashlib.sha256(ingredients.encode()).hexdigest()


def _read(file: Path) -> Found | None:
    """Return what an earlier search wrote, or None if there is nothing that can be read."""
    try:
        return TypeAdapter(Found).validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None
