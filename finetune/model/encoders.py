"""Encoders to start from: what they read and take, with the source of every figure."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml
from pydantic import TypeAdapter


@dataclass(frozen=True)
class Encoder:
    """An entry of ``encoders.yaml``, which says what its numbers are; ``gib`` is by mode."""

    name: str
    source: str
    languages: str
    license: str
    max_tokens: int
    parameters: int
    gib: Mapping[str, float]
    config: Mapping[str, Any]
    good_for: str


def read_encoders() -> list[Encoder]:
    """Return the encoders, those of one language first."""
    text = (resources.files("finetune.model") / "encoders.yaml").read_text("utf-8")
    return TypeAdapter(list[Encoder]).validate_python(yaml.safe_load(text))
