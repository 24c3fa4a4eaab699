"""All parts of a model on one device, with one result: searched for, or estimated for a Mac.

Where features of the frozen layers are stored, their extraction has a batch size of its own.
"""

import dataclasses
import time
from pathlib import Path

from finetune import events
from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.estimate import estimate
from finetune.batch_finder.find import Answer, Bounds, find_case
from finetune.batch_finder.outcomes import Outcome
from finetune.batch_finder.results import BatchResult, EstimateResult, PartProbe
from finetune.devices.base import Device
from finetune.devices.mps.chips import Mac
from finetune.errors import BatchDoesNotFit, ModelUnsupported
from finetune.events import Emit, Stage

_DESCRIPTIONS = {"whole": "", "features": ", feature extraction", "trainable": ", trainable layers"}


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
    parts: tuple[Part, ...] = ("features", "trainable") if stores_features else ("whole",)
    probes: list[PartProbe] = []
    answers: dict[Part, Answer] = {}
    for part in parts:
        what = f"{case.mode}{_DESCRIPTIONS[part]}, {case.padded_length} tokens"
        emit(Stage(f"searching on {device.name}: {what}"))
        try:
            answers[part] = search_part(
                dataclasses.replace(case, part=part),
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
    return _summarize(case, parts, answers, probes=tuple(probes), seconds=seconds)


def search_part(
    case: Case,
    *,
    device: Device,
    bounds: Bounds,
    cache: Path | None,
    emit: Emit,
    probes: list[PartProbe] | None = None,
) -> Answer:
    """Search for the batch sizes of one part, no larger than the device computes right.

    Args:
        case: What is trained, and its part.
        device: Where.
        bounds: Where the search ends.
        cache: Folder of the results of earlier searches; None to search in any case.
        emit: Receives progress events.
        probes: Each probe is appended to it.

    Raises:
        BatchDoesNotFit: If not even one example fits.
        ModelUnsupported: If the model can't be split into the case's part.
        ProbeFailed: If a probe failed for another reason than memory.
    """

    def report(outcome: Outcome) -> None:
        if probes is not None:
            probes.append(PartProbe(case.part, outcome))
        fields = dataclasses.asdict(outcome)
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
    parts: tuple[Part, ...] = ("features", "trainable") if stores_features else ("whole",)
    estimates = [
        estimate(dataclasses.replace(case, part=part), memory_bytes=mac.budget_bytes, limit=limit)
        for part in parts
    ]
    first, last = estimates[0], estimates[-1]
    return EstimateResult(
        machine=mac.name,
        device=case.device,
        mode=case.mode,
        padded_length=case.padded_length,
        precision=case.precision,
        stores_features=stores_features,
        budget_bytes=mac.budget_bytes,
        batch=last.batch,
        lowest_batch=last.lowest_batch,
        highest_batch=last.highest_batch,
        features_batch=first.batch if stores_features else None,
        peak_bytes=max(one.peak_bytes for one in estimates),
        basis=last.basis,
    )


def _summarize(
    case: Case,
    parts: tuple[Part, ...],
    answers: dict[Part, Answer],
    *,
    probes: tuple[PartProbe, ...],
    seconds: float,
) -> BatchResult:
    fits = len(answers) == len(parts)
    found = answers[parts[-1]].found if fits else None
    peaks = [answer.peak_bytes for answer in answers.values() if answer.peak_bytes]
    return BatchResult(
        device=case.device,
        mode=case.mode,
        padded_length=case.padded_length,
        precision=case.precision,
        stores_features=len(parts) > 1,
        budget_bytes=next((answer.budget_bytes for answer in answers.values()), None),
        max_verified=found.max_verified if found else 0,
        first_failed=found.first_failed if found else 1,
        predicted_maximum=found.predicted_maximum if found else None,
        recommended=found.recommended if found else 0,
        fastest=found.fastest if found else 0,
        features_batch=answers["features"].found.recommended if "features" in answers else None,
        peak_bytes=max(peaks) if fits and peaks else None,
        probes=probes,
        seconds=seconds,
    )
