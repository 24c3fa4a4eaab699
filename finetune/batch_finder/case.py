"""What a search is about: which training step, of which model, where."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.model.mode import Mode

Part = Literal["whole", "prefix", "suffix"]

# What a model's config says beside its architecture: where it comes from, and its old classes.
_NOT_ARCHITECTURE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "transformers_version",
}


@dataclass(frozen=True)
class Case:
    """Everything that the memory of an update depends on, but for the number of rows.

    Args:
        device: Name of the device.
        architecture: The model's config without what is not architecture.
        classes: How many the model tells apart.
        mode: What trains.
        padded_length: Tokens that the widest batch is padded to.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the arithmetic.
        part: ``whole`` for an update on texts. Where the frozen part of a model runs only once,
            ``prefix`` for its forward, and ``suffix`` for an update on what it gave.
    """

    device: str
    architecture: dict[str, Any]
    classes: int
    mode: Mode
    padded_length: int
    precision: str
    part: Part = "whole"

    def to_json(self) -> str:
        """Return the case as one line, the same for equal cases."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> "Case":
        """Return the case that ``to_json`` wrote."""
        fields = json.loads(line)
        return cls(**fields | {"mode": Mode(fields["mode"])})


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model's ``config.to_dict()`` decides its tensors, as JSON would give it."""
    kept = {name: value for name, value in model_config.items() if name not in _NOT_ARCHITECTURE}
    architecture: dict[str, Any] = json.loads(json.dumps(kept))
    return architecture
