"""What was found for a model on a device, and what is estimated for one that is not here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.estimate import Estimate
from finetune.batch_finder.outcomes import Outcome
from finetune.batch_finder.search import Found

SCHEMA_VERSION = 1
# What users read in JSON keeps the names that it has always had.
_JSON_NAMES = {"padded_length": "max_length", "features_batch": "prefix_batch"}
_JSON_PARTS = {"whole": "whole", "features": "prefix", "trainable": "suffix"}
_NOTHING = Found(
    max_verified=0, first_failed=1, predicted_maximum=None, fastest=0, recommended=0, probes=(),
    budget_bytes=0,
)  # fmt: skip


@dataclass(frozen=True)
class PartProbe:
    """One probe, and the part of the model that it was of."""

    part: Part
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Return the probe as ``find-batch --json`` prints it."""
        values = asdict(self.outcome)
        del values["is_strained"]
        batch, verdict = values.pop("batch_size"), values.pop("verdict")
        return {"part": _JSON_PARTS[self.part], "batch": batch, "outcome": verdict, **values}


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What both kinds of results say.

    Args:
        device: Its name.
        padded_length: Tokens of each example, padding included.
        stores_features: Whether updates take stored features of the frozen layers.
        budget_bytes: Memory that training may take; None where nothing fits.
        features_batch: Batch size to extract the features with, and to evaluate; None without.
        peak_bytes: Peak memory at the largest batch sizes, None where unknown.
    """

    device: str
    mode: str
    padded_length: int
    precision: str
    stores_features: bool
    budget_bytes: int | None
    features_batch: int | None
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``find-batch --json`` prints it."""
        names = [field.name for field in fields(self)]
        return {_JSON_NAMES.get(name, name): getattr(self, name) for name in names}


def _describe(case: Case) -> dict[str, Any]:
    names = ("device", "mode", "padded_length", "precision")
    return {name: getattr(case, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class BatchResult(_Result):
    """The batch sizes of a model in one mode on one device.

    Args:
        max_verified: Largest batch size of an update that passed; 0 where none fits.
        first_failed: Smallest that failed for memory, None if none did.
        predicted_maximum: Largest that is expected to fit, where time ended the search.
        recommended: Batch size to train with; 0 where none fits.
        fastest: Smallest probed size within 3 % of the best speed.
        probes: In order, of all parts.
        seconds: Wall time.
    """

    max_verified: int
    first_failed: int | None
    predicted_maximum: int | None
    recommended: int
    fastest: int
    probes: tuple[PartProbe, ...]
    seconds: float

    @classmethod
    def of(
        cls,
        case: Case,
        found: Mapping[Part, Found],
        *,
        stores_features: bool,
        probes: Sequence[PartProbe],
        seconds: float,
    ) -> "BatchResult":
        """Join what was found of a case's parts; where one does not fit, nothing does."""
        fits = len(found) == (2 if stores_features else 1)
        trained = list(found.values())[-1] if fits else _NOTHING
        peaks = [one.peak_bytes for one in found.values() if one.peak_bytes]
        return cls(
            **_describe(case),
            stores_features=stores_features,
            budget_bytes=next((one.budget_bytes for one in found.values()), None),
            features_batch=found["features"].recommended if "features" in found else None,
            peak_bytes=max(peaks) if fits and peaks else None,
            max_verified=trained.max_verified,
            first_failed=trained.first_failed,
            predicted_maximum=trained.predicted_maximum,
            recommended=trained.recommended,
            fastest=trained.fastest,
            probes=tuple(probes),
            seconds=seconds,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``find-batch --json`` prints it."""
        return super().to_json() | {"probes": [probe.to_json() for probe in self.probes]}


@dataclass(frozen=True, kw_only=True)
class EstimateResult(_Result):
    """The batch sizes that are expected of a model in one mode on a machine that is not here.

    Args:
        machine: Its name.
        batch: Largest batch size of an update that is expected to fit; 0 where none is.
        lowest_batch: Largest if the memory is underestimated as far as it may be.
        highest_batch: Largest if it is overestimated as far as it may be.
        basis: What the estimate rests on.
    """

    machine: str
    batch: int
    lowest_batch: int
    highest_batch: int
    basis: str

    @classmethod
    def of(cls, case: Case, estimates: Sequence[Estimate], *, machine: str) -> "EstimateResult":
        """Join the estimates of a case's parts, that of what trains last."""
        trained = estimates[-1]
        return cls(
            **_describe(case),
            stores_features=len(estimates) > 1,
            budget_bytes=trained.memory_bytes,
            features_batch=estimates[0].batch if len(estimates) > 1 else None,
            peak_bytes=max(one.peak_bytes for one in estimates),
            machine=machine,
            batch=trained.batch,
            lowest_batch=trained.lowest_batch,
            highest_batch=trained.highest_batch,
            basis=trained.basis,
        )


@dataclass(frozen=True)
class FoundBatches:
    """What ``find-batch`` found: searched for on this machine, or estimated for another.

    Args:
        results: One per device and mode; empty where it estimated.
        estimates: One per padded length and mode; empty where it searched.
    """

    results: tuple[BatchResult, ...] = ()
    estimates: tuple[EstimateResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        name, found = ("estimates", self.estimates) if self.estimates else ("results", self.results)
        return {"schema_version": SCHEMA_VERSION, name: [one.to_json() for one in found]}
