"""What was found for a model on a device, and what is estimated for one that is not here."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from finetune.batch_finder.case import Part
from finetune.batch_finder.outcomes import Outcome

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
        return {
            "part": _JSON_PARTS[self.part],
            "batch": self.outcome.batch_size,
            "outcome": self.outcome.verdict,
            "peak_bytes": self.outcome.peak_bytes,
            "examples_per_second": self.outcome.examples_per_second,
            "seconds": self.outcome.seconds,
            "reason": self.outcome.reason,
        }


@dataclass(frozen=True)
class BatchResult:
    """The batch sizes of a model in one mode on one device.

    Args:
        device: Name of the device.
        mode: What trains.
        padded_length: Tokens of each example, padding included.
        precision: Of the arithmetic.
        stores_features: Whether updates take stored features of the frozen layers.
        budget_bytes: Memory that a probe could hold; None where no part fits.
        max_verified: Largest batch size of an update that passed; 0 where none fits.
        first_failed: Smallest that failed for memory, None if none did.
        predicted_maximum: Largest that is expected to fit, where time ended the search.
        recommended: Batch size to train with; 0 where none fits.
        fastest: Smallest probed size within 3 % of the best speed.
        features_batch: Batch size to extract the features with, and to evaluate; None without.
        peak_bytes: Peak memory at the largest sizes, None where unknown.
        probes: All probes, in order.
        seconds: Wall time.
    """

    device: str
    mode: str
    padded_length: int
    precision: str
    stores_features: bool
    budget_bytes: int | None
    max_verified: int
    first_failed: int | None
    predicted_maximum: int | None
    recommended: int
    fastest: int
    features_batch: int | None
    peak_bytes: int | None
    probes: tuple[PartProbe, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``find-batch --json`` prints it."""
        return _to_json(self) | {"probes": [probe.to_json() for probe in self.probes]}


@dataclass(frozen=True)
class EstimateResult:
    """The batch sizes that are expected of a model in one mode on a machine that is not here.

    Args:
        machine: Name of the machine.
        device: Name of its device.
        mode: What trains.
        padded_length: Tokens of each example, padding included.
        precision: Of the arithmetic.
        stores_features: Whether updates take stored features of the frozen layers.
        budget_bytes: Memory that training may take there.
        batch: Largest batch size of an update that is expected to fit; 0 where none is.
        lowest_batch: Largest if the memory is underestimated as far as it may be.
        highest_batch: Largest if it is overestimated as far as it may be.
        features_batch: Largest batch size of the feature extraction; None without.
        peak_bytes: Expected peak memory.
        basis: What the estimate rests on.
    """

    machine: str
    device: str
    mode: str
    padded_length: int
    precision: str
    stores_features: bool
    budget_bytes: int
    batch: int
    lowest_batch: int
    highest_batch: int
    features_batch: int | None
    peak_bytes: int
    basis: str

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as ``find-batch --json`` prints it."""
        return _to_json(self)


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


def _to_json(result: BatchResult | EstimateResult) -> dict[str, Any]:
    return {
        _JSON_NAMES.get(field.name, field.name): getattr(result, field.name)
        for field in dataclasses.fields(result)
    }
