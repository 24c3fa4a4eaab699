"""What was found for a model on a device, and what is estimated for one that is not here."""

from dataclasses import dataclass
from typing import Any

from finetune.batch_finder.case import Case, Part
from finetune.batch_finder.search import BatchSizes
from finetune.events import Trial
from finetune.tasks.shown import Shown

SCHEMA_VERSION = 1
# The names in JSON are those that users' scripts read.
_JSON_NAMES = {
    "padded_length": "max_length",
    "features_batch": "prefix_batch",
    "trials": "probes",
    "batch_size": "batch",
    "status": "outcome",
}
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
        return {_JSON_NAMES.get(name, name): value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class BatchResult(BatchSizes, _Result):
    """The batch sizes of a model in one mode on one device, with all trials; 0 where none fits."""

    trials: tuple[Trial, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        trials = [
            {_JSON_NAMES.get(name, name): value for name, value in vars(trial).items()}
            | {"part": _JSON_PARTS[trial.part]}
            for trial in self.trials
        ]
        return super().to_json() | {"probes": trials}


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


@dataclass(frozen=True, repr=False)
class FoundBatches(Shown):
    """What ``find-batch`` found on this machine, or estimated for another."""

    results: tuple[BatchResult, ...] = ()
    estimates: tuple[EstimateResult, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each mode and length, without the trials."""
        rows = [{**one.to_json(), "probes": None} for one in self.estimates or self.results]
        return [{name: one for name, one in row.items() if one is not None} for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        name, found = ("estimates", self.estimates) if self.estimates else ("results", self.results)
        return {"schema_version": SCHEMA_VERSION, name: [one.to_json() for one in found]}
