"""All parts of a model on one device, with one result: searched for, or estimated for a Mac.

Where features of the frozen layers are stored, their extraction has a batch size of its own.
"""

import time
from dataclasses import replace

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.estimate import estimate
from finetune.batch_finder.find import Finder
from finetune.batch_finder.results import BatchResult, EstimateResult
from finetune.batch_finder.search import Found
from finetune.devices.mps.chips import Mac
from finetune.errors import BatchDoesNotFit, ModelUnsupported
from finetune.events import Stage, WarningMessage

_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


def parts_of(*, stores_features: bool) -> tuple[Part, ...]:
    """Return what has a batch size of its own; what trains comes last."""
    return ("features", "trainable") if stores_features else ("whole",)


def search_parts(case: Case, finder: Finder, *, stores_features: bool) -> BatchResult:
    """Search for the batch sizes of all parts of a model, of whichever part the case is.

    A model of which no features can be stored is searched as a whole.

    Args:
        case: What is trained.
        finder: Has not searched yet; emits progress events.
        stores_features: Whether features of the frozen layers are stored.

    Raises:
        ProbeFailed: If a probe failed for another reason than memory.
    """
    started = time.perf_counter()
    found: dict[Part, Found] = {}
    for part in parts_of(stores_features=stores_features):
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        finder.emit(Stage(f"searching on {finder.device.name}: {what}"))
        try:
            found[part] = finder.find(replace(case, part=part))
        except BatchDoesNotFit as error:
            finder.emit(WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupported as error:
            finder.emit(WarningMessage(f"{error.message}: the whole model runs at every update"))
            return search_parts(case, finder, stores_features=False)
    seconds = time.perf_counter() - started
    return BatchResult.of(
        case, found, stores_features=stores_features, probes=finder.probes, seconds=seconds
    )


def estimate_parts(case: Case, mac: Mac, *, stores_features: bool, limit: int) -> EstimateResult:
    """Estimate the batch sizes, up to a limit, of all parts of a model on a Mac, without it."""
    estimates = [
        estimate(replace(case, part=part), memory_bytes=mac.budget_bytes, limit=limit)
        for part in parts_of(stores_features=stores_features)
    ]
    return EstimateResult.of(case, estimates, machine=mac.name)
