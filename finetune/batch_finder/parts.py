"""All parts of a model on one device, with one result: searched for, or estimated for a Mac.

Where features of the frozen layers are stored, their extraction has a batch size of its own.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path

from finetune import events
from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.estimate import estimate
from finetune.batch_finder.find import Bounds, find_case
from finetune.batch_finder.outcomes import Outcome
from finetune.batch_finder.results import BatchResult, EstimateResult, PartProbe
from finetune.batch_finder.search import Found
from finetune.devices.base import Device
from finetune.devices.mps.chips import Mac
from finetune.errors import BatchDoesNotFit, ModelUnsupported
from finetune.events import Emit, Stage

_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


def parts_of(*, stores_features: bool) -> tuple[Part, ...]:
    """Return what has a batch size of its own; what trains comes last."""
    return ("features", "trainable") if stores_features else ("whole",)


def search_parts(
    case: Case,
    *,
    stores_features: bool,
    device: Device,
    bounds: Bounds,
    cache: Path | None,
    emit: Emit,
) -> BatchResult:
    """Search for the batch sizes of all parts of a model.

    Args:
        case: What is trained, of whichever part.
        stores_features: Whether features of the frozen layers are stored. A model that can't be
            split there is searched as a whole.
        device: Where.
        bounds: Where each part's search ends.
        cache: Folder of the results of earlier searches; None to search in any case.
        emit: Receives progress events.

    Raises:
        ProbeFailed: If a probe failed for another reason than memory.
    """
    started = time.perf_counter()
    probes: list[PartProbe] = []
    found: dict[Part, Found] = {}
    for part in parts_of(stores_features=stores_features):
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        emit(Stage(f"searching on {device.name}: {what}"))
        try:
            found[part] = search_part(
                replace(case, part=part),
                device=device, bounds=bounds, cache=cache, emit=emit, probes=probes,
            )  # fmt: skip
        except BatchDoesNotFit as error:
            emit(events.WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupported as error:
            emit(events.WarningMessage(f"{error.message}: the whole model runs at every update"))
            return search_parts(
                case, stores_features=False, device=device, bounds=bounds, cache=cache, emit=emit
            )
    seconds = time.perf_counter() - started
    return BatchResult.of(
        case, found, stores_features=stores_features, probes=tuple(probes), seconds=seconds
    )


def search_part(
    case: Case,
    *,
    device: Device,
    bounds: Bounds,
    cache: Path | None,
    emit: Emit,
    probes: list[PartProbe] | None = None,
) -> Found:
    """Search as ``find_case`` does for sizes that the device computes right; emit each probe.

    Each probe is also appended to ``probes``.
    """

    def report(outcome: Outcome) -> None:
        if probes is not None:
            probes.append(PartProbe(case.part, outcome))
        fields = asdict(outcome)
        del fields["is_strained"]
        emit(events.Probe(**fields))

    bounds = bounds.clamp(device.shapes.max_examples(padded_length=case.padded_length))
    return find_case(case, device=device, bounds=bounds, cache=cache, on_probe=report)


def estimate_parts(case: Case, mac: Mac, *, stores_features: bool, limit: int) -> EstimateResult:
    """Estimate the batch sizes of all parts of a model on a Mac, without it.

    Args:
        case: What is trained, of whichever part.
        mac: The Mac.
        stores_features: Whether features of the frozen layers are stored.
        limit: Largest batch size of interest.
    """
    estimates = [
        estimate(replace(case, part=part), memory_bytes=mac.budget_bytes, limit=limit)
        for part in parts_of(stores_features=stores_features)
    ]
    return EstimateResult.of(case, estimates, machine=mac.name)
