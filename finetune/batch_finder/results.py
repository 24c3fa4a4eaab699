"""What was found for a model on a device, and what is estimated for one that is not here."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from finetune.batch_finder.case import Part
from finetune.batch_finder.estimate import EstimatedSizes
from finetune.batch_finder.outcomes import Outcome
from finetune.batch_finder.search import SearchedSizes

SCHEMA_VERSION = 1
# What users read in JSON keeps the names that it has always had.
_JSON_NAMES = {"padded_length": "max_length", "features_batch": "prefix_batch"}
_JSON_PARTS = {"whole": "whole", "features": "prefix", "trainable": "suffix"}


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
        stores_features: Whether steps take stored features of the frozen layers.
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


@dataclass(frozen=True, kw_only=True)
class BatchResult(SearchedSizes, _Result):
    """The batch sizes of a model in one mode on one device; 0 where none fits.

    Args:
        probes: In order, of all parts.
        seconds: Wall time.
    """

    probes: tuple[PartProbe, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``find-batch --json`` prints it."""
        return super().to_json() | {"probes": [probe.to_json() for probe in self.probes]}


def least_of(results: Sequence[BatchResult]) -> BatchResult:
    """Return sizes that fit in each of the processes that have found these, for the same case.

    The rest is that of the process whose memory holds the fewest examples.
    """
    shortest = min(results, key=lambda one: one.max_verified)
    return replace(
        shortest,
        recommended=min(one.recommended for one in results),
        fastest=min(one.fastest for one in results),
        features_batch=min(
            (one.features_batch for one in results if one.features_batch is not None), default=None
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EstimateResult(EstimatedSizes, _Result):
    """The batch sizes that are expected of a model in one mode on a machine, by its name."""

    machine: str


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
