"""Search for the batch sizes of a model on one device, or confirm the results of a search."""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.batch_finder.results import Case, Part, Result, parts_of
from finetune.batch_finder.search import search
from finetune.batch_finder.trials import TrialRunner
from finetune.config.load import parse_size
from finetune.config.schema import SearchConfig
from finetune.devices.base import Device
from finetune.devices.host import available_bytes, gibibytes
from finetune.distributed import read_launch
from finetune.errors import BatchDoesNotFitError, ModelUnsupportedError
from finetune.events import Info, WarningMessage, emit
from finetune.files import WRITTEN_BY, write_cache_json

# Results depend on these packages. This package decides what is recommended.
_PACKAGES = ("finetune-mps", "torch", "transformers", "accelerate")
# Free memory is never quite the same. A budget larger by this factor is worth another search.
_MORE_BUDGET = 1.05
_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


@dataclass(frozen=True)
class Search:
    """Where and how to search. ``first`` is None to start with a small batch size.

    A ``cache`` is a folder of the results of earlier searches, which a fresh search does not read.
    """

    device: Device
    options: SearchConfig
    limit: int
    first: int | None
    cache: Path | None
    is_fresh: bool = False

    def limit_bytes(self) -> int | None:
        """Return the memory limit of a trial. Ranks of one host divide its memory."""
        limit, ranks = memory_limit_bytes(self.options), read_launch().local_world_size
        if ranks == 1 or not self.device.memory.is_shared:
            return limit
        share = available_bytes() // ranks
        return share if limit is None else min(limit, share)


def memory_limit_bytes(options: SearchConfig) -> int | None:
    """Return the most memory that the user allows."""
    text = options.memory
    return None if text is None else parse_size(text, source="--memory")


def find(case: Case, where: Search) -> Result:
    """Search for the batch sizes of a case, or confirm an earlier result with one trial."""
    started = time.perf_counter()
    device, time_limit = where.device, where.options.time_limit
    max_correct = device.shapes.max_examples(padded_length=case.padded_length)
    limit = where.limit if max_correct is None else min(where.limit, max_correct)
    first = where.first and min(where.first, limit)
    limit_bytes = where.limit_bytes()
    bounds = {"limit": limit, "first": first} | asdict(where.options)
    file = where.cache and where.cache / f"{_key(case, device, bounds)}.json"
    cached = None
    if file and not where.is_fresh:
        with suppress(OSError, ValueError):
            cached = TypeAdapter(Result).validate_json(file.read_bytes())
    with TrialRunner(case, device, limit_bytes=limit_bytes, timeout_seconds=time_limit) as runner:
        budget_bytes = runner.budget_bytes()
        if cached:
            has_more = budget_bytes > _MORE_BUDGET * (cached.budget_bytes or 0)
            if cached.is_short_of_memory and has_more:
                first = cached.largest
            elif (trial := runner.run(cached.recommended, new_process=True)).status == "fits":
                return replace(cached, budget_bytes=budget_bytes, trials=(trial,))
        try:
            result = search(
                runner.run,
                budget_bytes=budget_bytes,
                limit=limit,
                first=first,
                time_limit=time_limit - (time.perf_counter() - started),
                slows_down=device.memory.swaps,
            )
        except BatchDoesNotFitError as error:
            raise explain(error, device, limit_bytes) from None
    if file:
        write_cache_json(file, asdict(result) | WRITTEN_BY)
    return result


def explain(
    error: BatchDoesNotFitError, device: Device, limit_bytes: int | None
) -> BatchDoesNotFitError:
    """Return the error, with another remedy if other processes use most of the memory."""
    total_bytes, free_bytes = device.memory.total_bytes(), free_bytes_of(device)
    if 2 * free_bytes > total_bytes or (limit_bytes and limit_bytes < free_bytes):
        return error
    others = f"another process uses {gibibytes(total_bytes - free_bytes)}"
    return BatchDoesNotFitError(
        f"{error.message}: {others}", remedy="close it, and run the command again"
    )


def find_parts(case: Case, where: Search, *, stores_features: bool) -> Result:
    """Search for the batch sizes of all parts of a model, or of the whole if it can't be split."""
    started = time.perf_counter()
    results: dict[Part, Result] = {}
    parts = parts_of(stores_features=stores_features)
    for part in parts:
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        emit(Info(f"searching on {where.device.name}: {what}"))
        try:
            results[part] = find(replace(case, part=part), where)
        except BatchDoesNotFitError as error:
            emit(WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupportedError as error:
            if part == "whole":
                raise
            emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
            return find_parts(case, where, stores_features=False)
    fits = len(results) == len(parts)
    peaks = [result.peak_bytes for result in results.values() if result.peak_bytes]
    return replace(
        results[parts[-1]] if fits else Result(),
        **case.identity(),
        stores_features=stores_features,
        budget_bytes=next((result.budget_bytes for result in results.values()), None),
        features_batch_size=results["features"].recommended if "features" in results else None,
        peak_bytes=max(peaks) if fits and peaks else None,
        trials=tuple(trial for result in results.values() for trial in result.trials),
        seconds=time.perf_counter() - started,
    )


def _key(case: Case, device: Device, bounds: Mapping[str, Any]) -> str:
    """Return a key of everything that a result depends on, except the budget."""
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    case_json, limits = (json.dumps(part, sort_keys=True) for part in (asdict(case), bounds))
    ingredients = "\n".join([case_json, device.description, *versions, limits])
    return hashlib.sha256(ingredients.encode()).hexdigest()


def free_bytes_of(device: Device) -> int:
    """Return the memory of a device that other programs leave free."""
    return available_bytes() if device.memory.is_shared else device.memory.budget_bytes(None)
