"""The batch sizes that a search found on a device, or that are estimated for a Mac."""

from dataclasses import asdict, dataclass
from typing import Any

from finetune.events import Trial
from finetune.tasks.shown import DisplayMixin

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """The batch sizes of a model in one mode. Sizes are 0 if not even one example fits.

    Args:
        machine: The Mac, in an estimate.
        budget_bytes: The memory that training may take, None if nothing fits.
        peak_bytes: Peak memory at the largest size, None if unknown.
        largest: The largest size that fits, confirmed in a new process.
        first_failed: The smallest size that failed for memory.
        predicted_largest: The largest size that should fit, if time ended the search.
        fastest: The smallest size whose speed is within 3% of the best.
        recommended: The size to train with: the fastest that leaves room.
        features_batch_size: The size for extracting features and evaluating.
        highest: The upper bound of an estimate, whose lower bound is ``recommended``.
        basis: What an estimate is based on.
    """

    device: str = ""
    machine: str | None = None
    mode: str = ""
    padded_length: int = 0
    precision: str = ""
    stores_features: bool = False
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    largest: int = 0
    first_failed: int | None = 1
    predicted_largest: int | None = None
    fastest: int | None = 0
    recommended: int = 0
    features_batch_size: int | None = None
    highest: int | None = None
    basis: str | None = None
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0

    @property
    def examples_per_second(self) -> float:
        """Speed at the recommended size."""
        speeds = {trial.batch_size: trial.examples_per_second for trial in self.trials}
        return speeds[self.recommended] or 0.0

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a larger batch size would be recommended if there were more memory."""
        return self.first_failed is not None or self.recommended < (self.fastest or 0)


@dataclass(frozen=True, repr=False)
class FoundBatches(DisplayMixin):
    """What ``find-batch`` found on this machine, or estimated for another."""

    results: tuple[Result, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each mode and length, without the trials."""
        rows = [asdict(result) | {"trials": None} for result in self.results]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return what ``find-batch --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "results": [asdict(result) for result in self.results],
        }
