"""All parts of a model on one device, with one result: searched for, or estimated for a Mac.

Where features of the frozen layers are stored, their extraction has a batch size of its own.
"""

import time
from dataclasses import asdict, fields, replace
from typing import Any

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.estimate import estimate
from finetune.batch_finder.find import Finder
from finetune.batch_finder.results import BatchResult, EstimateResult
from finetune.batch_finder.search import Found, SearchedSizes
from finetune.devices.mps.chips import Mac
from finetune.errors import BatchDoesNotFit, ModelUnsupported
from finetune.events import Info, WarningMessage

# What is found where a part does not fit, so that nothing does.
_NOTHING = SearchedSizes(
    max_verified=0, first_failed=1, predicted_maximum=None, recommended=0, fastest=0
)
_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


def parts_of(*, stores_features: bool) -> tuple[Part, ...]:
    """Return what has a batch size of its own; what trains comes last."""
    return ("features", "trainable") if stores_features else ("whole",)


def search_parts(case: Case, finder: Finder, *, stores_features: bool) -> BatchResult:
    """Search for the batch sizes of all parts of a model, with a finder that has not searched yet.

    It does not matter of which part the case is. A model that can't be split is searched as a
    whole, even if features of its frozen layers should be stored.

    Raises:
        ProbeFailed: If a probe failed for another reason than memory.
        ModelUnsupported: If the model has no gradient checkpointing.
    """
    started = time.perf_counter()
    parts = parts_of(stores_features=stores_features)
    found: dict[Part, Found] = {}
    for part in parts:
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        finder.emit(Info(f"searching on {finder.device.name}: {what}"))
        try:
            found[part] = finder.find(replace(case, part=part))
        except BatchDoesNotFit as error:
            finder.emit(WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupported as error:
            if part == "whole":
                raise
            finder.emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
            return search_parts(case, finder, stores_features=False)
    fits = set(found) == set(parts)
    trained = found[parts[-1]] if fits else _NOTHING
    peaks = [one.peak_bytes for one in found.values() if one.peak_bytes]
    return BatchResult(
        **_of_case(case, len(parts)),
        **{field.name: getattr(trained, field.name) for field in fields(SearchedSizes)},
        budget_bytes=next((one.budget_bytes for one in found.values()), None),
        features_batch=found["features"].recommended if "features" in found else None,
        peak_bytes=max(peaks) if fits and peaks else None,
        probes=tuple(finder.probes),
        seconds=time.perf_counter() - started,
    )


def estimate_parts(case: Case, mac: Mac, *, stores_features: bool, limit: int) -> EstimateResult:
    """Estimate the batch sizes, up to a limit, of all parts of a model on a Mac, without it."""
    found = {
        part: estimate(replace(case, part=part), memory_bytes=mac.budget_bytes, limit=limit)
        for part in parts_of(stores_features=stores_features)
    }
    peak_bytes = max(one.peak_bytes for one in found.values())
    return EstimateResult(
        **_of_case(case, len(found)),
        **asdict(replace(list(found.values())[-1], peak_bytes=peak_bytes)),
        budget_bytes=mac.budget_bytes,
        features_batch=found["features"].batch if "features" in found else None,
        machine=mac.name,
    )


def _of_case(case: Case, parts: int) -> dict[str, Any]:
    names = ("device", "mode", "padded_length", "precision")
    return {name: getattr(case, name) for name in names} | {"stores_features": parts > 1}
