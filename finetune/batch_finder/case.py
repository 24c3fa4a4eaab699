"""What a search is about: a step of which model, and where."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.mode import Lora, Mode

Part = Literal["whole", "features", "trainable"]

# Where a model comes from and its former classes: neither changes the shape of its tensors.
_NOT_ARCHITECTURE = {
    "_name_or_path", "architectures", "dtype", "id2label", "label2id", "problem_type",
    "task_specific_params", "transformers_version",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Everything that the memory of a step depends on, but for the batch size.

    ``part`` is ``whole`` for a step on texts. Where features of the frozen layers are stored, it is
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


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model's ``config.to_dict()`` decides its tensors, in JSON's types."""
    kept = {name: value for name, value in model_config.items() if name not in _NOT_ARCHITECTURE}
    architecture: dict[str, Any] = json.loads(json.dumps(kept))
    return architecture
