"""The step whose batch size is searched for: of which model, and where."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.mode import Lora, Mode

Part = Literal["whole", "features", "trainable"]

# The origin of a model and its former classes do not change the shapes of its tensors.
_NOT_ARCHITECTURE = {
    "_name_or_path", "architectures", "dtype", "id2label", "label2id", "problem_type",
    "task_specific_params", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Everything that the memory of a step depends on, except the batch size.

    ``part`` is ``whole`` for a step on texts. If features of the frozen layers are stored, it is
    ``features`` for their extraction and ``trainable`` for a step on them. The architecture counts
    the layer of ``model.mean_pooling``.
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
        """Return the fields that a result has too."""
        names = ("device", "mode", "padded_length", "precision")
        return {name: getattr(self, name) for name in names}


def parts_of(*, stores_features: bool) -> tuple[Part, ...]:
    """Return the parts that have a batch size each. The part that trains is the last."""
    return ("features", "trainable") if stores_features else ("whole",)


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``config.to_dict()`` that decides the tensors, as JSON types."""
    kept = {name: value for name, value in model_config.items() if name not in _NOT_ARCHITECTURE}
    architecture: dict[str, Any] = json.loads(json.dumps(kept))
    return architecture
