"""Cases of a batch-size search, and the results of searches and estimates."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from finetune.config.modes import Mode
from finetune.config.schema import Lora
from finetune.events import Trial
from finetune.files import SCHEMA_VERSION
from finetune.tasks.tables import DisplayMixin

Part = Literal["whole", "features", "trainable"]

# Config keys that don't affect tensor shapes, such as the origin of the model.
_NOT_ARCHITECTURE = {
    "_name_or_path", "architectures", "dtype", "id2label", "label2id", "problem_type",
    "task_specific_params", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Everything that the memory of a step depends on except the batch size.

    ``part`` is ``whole`` for a step on texts. If frozen-layer features are stored, it is
    ``features`` for their extraction and ``trainable`` for a step on them. The architecture
    includes the layer of ``model.mean_pooling``.
    """

    device: str
    architecture: dict[str, Any]
    classes: int
    mode: Mode
    padded_length: int
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    part: Part = "whole"
    task: str = "single"
    has_mean_layer: bool = False
    lora: Lora | None = None

    def identity(self) -> dict[str, Any]:
        """Return the fields shared with a result."""
        names = ("device", "mode", "padded_length", "precision")
        return {name: getattr(self, name) for name in names}


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``config.to_dict()`` that determines tensor shapes, as JSON types."""
    kept = {name: value for name, value in model_config.items() if name not in _NOT_ARCHITECTURE}
    architecture: dict[str, Any] = json.loads(json.dumps(kept))
    return architecture


@dataclass(frozen=True, kw_only=True)
class Result:
    """The batch sizes of a model in one mode. Sizes are 0 if not even one example fits.

    Args:
        machine: The Mac of an estimate.
        budget_bytes: The memory that training can use, or None if nothing fits.
        peak_bytes: Peak memory at the largest size, or None if unknown.
        largest: The largest size that fits, confirmed in a new process.
        first_failed: The smallest size that ran out of memory.
        predicted_largest: The predicted largest size, if the search hit its time limit.
        fastest: The smallest size whose speed is within 3% of the best.
        recommended: The size to train with: the fastest with enough memory to spare.
        features_batch_size: The size for feature extraction and evaluation.
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
        """Whether a larger batch size would be recommended with more memory."""
        return self.first_failed is not None or self.recommended < (self.fastest or 0)


@dataclass(frozen=True, repr=False)
class FoundBatches(DisplayMixin):
    """The results of ``find-batch`` on this machine, or estimates for another."""

    results: tuple[Result, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return one row per mode and length, without trials."""
        rows = [asdict(result) | {"trials": None} for result in self.results]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``find-batch``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "results": [asdict(result) for result in self.results],
        }
