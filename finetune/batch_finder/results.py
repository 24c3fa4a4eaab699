"""What was found for a model on a device, and what is estimated for one that is not here."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.search import BatchSizes
from finetune.events import Trial

SCHEMA_VERSION = 1
# The names in JSON are those that users' scripts read.
_JSON_NAMES = {"padded_length": "max_length", "features_batch": "prefix_batch"}
_JSON_PARTS = {"whole": "whole", "features": "prefix", "trainable": "suffix"}


def parts_of(*, stores_features: bool) -> tuple[Part, ...]:
    """Return what has a batch size of its own; what trains comes last."""
    return ("features", "trainable") if stores_features else ("whole",)


def identity_of(case: Case) -> dict[str, Any]:
    """Return what a result says of its case."""
    return {name: getattr(case, name) for name in ("device", "mode", "padded_length", "precision")}


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What a search and an estimate have in common.

    ``budget_bytes`` is what training may take, None where nothing fits. ``features_batch`` is for
    extracting features and evaluating. ``peak_bytes`` is at the largest sizes, None where unknown.
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
        """Return what ``find-batch --json`` prints."""
        names = [field.name for field in fields(self)]
        return {_JSON_NAMES.get(name, name): getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class BatchResult(BatchSizes, _Result):
    """The batch sizes of a model in one mode on one device, with all trials; 0 where none fits."""

    trials: tuple[Trial, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        values = super().to_json()
        del values["trials"]
        return values | {"probes": [_trial_json(trial) for trial in self.trials]}


def _trial_json(trial: Trial) -> dict[str, Any]:
    values = asdict(trial)
    del values["is_strained"]
    part, batch, status = (values.pop(name) for name in ("part", "batch_size", "status"))
    return {"part": _JSON_PARTS[part], "batch": batch, "outcome": status, **values}


def least_of(results: Sequence[BatchResult]) -> BatchResult:
    """Return sizes that fit in each of the processes that have found these, for the same case."""
    smallest = min(results, key=lambda one: one.max_verified)
    features = [one.features_batch for one in results if one.features_batch is not None]
    return replace(
        smallest,
        recommended=min(one.recommended for one in results),
        fastest=min(one.fastest for one in results),
        features_batch=min(features, default=None),
    )


@dataclass(frozen=True, kw_only=True)
class EstimateResult(_Result):
    """The largest batch that is expected to fit, with the bounds of its error; 0 if none does.

    ``basis`` tells the user what the numbers rest on.
    """

    batch: int
    lowest_batch: int
    highest_batch: int
    basis: str
    machine: str


@dataclass(frozen=True)
class FoundBatches:
    """What ``find-batch`` found on this machine, or estimated for another."""

    results: tuple[BatchResult, ...] = ()
    estimates: tuple[EstimateResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        name, found = ("estimates", self.estimates) if self.estimates else ("results", self.results)
        return {"schema_version": SCHEMA_VERSION, name: [one.to_json() for one in found]}
