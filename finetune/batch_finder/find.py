"""The largest batch size and the fastest of a model on one device, searched for or cached."""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.history import History
from finetune.batch_finder.results import BatchResult, identity_of, parts_of
from finetune.batch_finder.search import BatchSizes, SearchResult, search
from finetune.batch_finder.trials import TrialRunner, free_bytes_of
from finetune.config.load import parse_size
from finetune.config.schema import SearchConfig
from finetune.devices.base import Device
from finetune.devices.host import gibibytes
from finetune.devices.host_memory import spare_bytes
from finetune.distributed.launch import read_launch
from finetune.errors import BatchDoesNotFit, ModelUnsupported
from finetune.events import Emit, Event, Info, Trial, WarningMessage
from finetune.files import WRITTEN_BY, keep_json

# What a result depends on; this package decides what it recommends.
_PACKAGES = ("finetune-mps", "torch", "transformers", "accelerate")
# Free memory is never quite the same twice. A budget larger by this is worth another search.
_MORE_BUDGET = 1.05
_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


@dataclass(frozen=True)
class Search:
    """Where and how a search goes; ``first`` is None to begin with a small batch size.

    A ``cache`` is a folder of the results of earlier searches, which a fresh one does not read;
    ``emit`` receives each trial.
    """

    device: Device
    options: SearchConfig
    limit: int
    first: int | None
    cache: Path | None
    emit: Emit
    is_fresh: bool = False

    def limit_bytes(self) -> int | None:
        """Return the most that a trial may hold: processes of one host divide the host's memory."""
        limit, processes = memory_limit_bytes(self.options), read_launch().local_world_size
        if processes == 1 or not self.device.memory.is_shared:
            return limit
        share = spare_bytes() // processes
        return share if limit is None else min(limit, share)


def memory_limit_bytes(options: SearchConfig) -> int | None:
    """Return the most memory that the user allows; refuse what is no size of memory."""
    text = options.memory
    return None if text is None else parse_size(text, source="--memory")


def find(case: Case, where: Search) -> SearchResult:
    """Search for a case's batch sizes, or confirm by one trial what an earlier search found.

    No size is tried that the device computes wrongly. With more memory than an earlier search
    had, this one begins where that one ended.
    """
    started = time.perf_counter()
    device, time_limit = where.device, where.options.time_limit
    sound = device.shapes.max_examples(padded_length=case.padded_length)
    limit = where.limit if sound is None else min(where.limit, sound)
    first = where.first and min(where.first, limit)
    limit_bytes = where.limit_bytes()
    bounds = {"limit": limit, "first": first} | asdict(where.options)
    file = where.cache and where.cache / f"{_key(case, device, bounds)}.json"
    cached = None
    if file and not where.is_fresh:
        with suppress(OSError, ValueError):
            cached = TypeAdapter(SearchResult).validate_json(file.read_bytes())
    with TrialRunner(
        case, device, limit_bytes=limit_bytes, timeout_seconds=time_limit, emit=where.emit
    ) as runner:
        budget_bytes = runner.budget_bytes()
        if cached:
            if cached.is_short_of_memory and budget_bytes > _MORE_BUDGET * cached.budget_bytes:
                first = cached.max_verified
            elif runner.run_afresh(cached.recommended).status == "fits":
                return replace(cached, budget_bytes=budget_bytes)
        seconds_left = time_limit - (time.perf_counter() - started)
        history = History(budget_bytes, limit, first, seconds_left, device.memory.swaps)
        try:
            found = search(runner.run, run_afresh=runner.run_afresh, history=history)
        except BatchDoesNotFit as error:
            raise explain(error, device, limit_bytes) from None
    if file and not runner.is_crowded:
        keep_json(file, asdict(found) | WRITTEN_BY)
    return found


def explain(error: BatchDoesNotFit, device: Device, limit_bytes: int | None) -> BatchDoesNotFit:
    """Return the error that nothing fits, with another remedy if others hold most of the memory."""
    total_bytes, free_bytes = device.memory.total_bytes(), free_bytes_of(device)
    if 2 * free_bytes > total_bytes or (limit_bytes and limit_bytes < free_bytes):
        return error
    others = f"another process holds {gibibytes(total_bytes - free_bytes)}"
    return BatchDoesNotFit(f"{error.message}: {others}", remedy="close it and run again")


def find_parts(case: Case, where: Search, *, stores_features: bool) -> BatchResult:
    """Search for the batch sizes of all parts of a model, whatever part the case names.

    A model that can't be split is searched as a whole, even if features should be stored.
    """
    started = time.perf_counter()
    trials: list[Trial] = []

    def emit(event: Event) -> None:
        if isinstance(event, Trial):
            trials.append(event)
        where.emit(event)

    parts = parts_of(stores_features=stores_features)
    found: dict[Part, SearchResult] = {}
    for part in parts:
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        emit(Info(f"searching on {where.device.name}: {what}"))
        try:
            found[part] = find(replace(case, part=part), replace(where, emit=emit))
        except BatchDoesNotFit as error:
            emit(WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupported as error:
            if part == "whole":
                raise
            emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
            return find_parts(case, where, stores_features=False)
    fits = set(found) == set(parts)
    sizes = found[parts[-1]] if fits else BatchSizes()
    peaks = [one.peak_bytes for one in found.values() if one.peak_bytes]
    return BatchResult(
        **identity_of(case),
        **{field.name: getattr(sizes, field.name) for field in fields(BatchSizes)},
        stores_features=stores_features,
        budget_bytes=next((one.budget_bytes for one in found.values()), None),
        features_batch=found["features"].recommended if "features" in found else None,
        peak_bytes=max(peaks) if fits and peaks else None,
        trials=tuple(trials),
        seconds=time.perf_counter() - started,
    )


def _key(case: Case, device: Device, bounds: dict[str, Any]) -> str:
    """Return a key of all that a result depends on but the budget."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    case_json, limits = (json.dumps(one, sort_keys=True) for one in (asdict(case), bounds))
    ingredients = "\n".join([case_json, device.description, *versions, limits])
    return hashlib.sha256(ingredients.encode()).hexdigest()
