"""The part of a model that trains."""

import re
from dataclasses import dataclass
from typing import Literal

HeadName = Literal["whole", "classifier"]
# Modes with a frozen encoder.
HEAD_MODES = ("head", "classifier")
_LAST = re.compile(r"(?:lora-)?last-([1-9]\d*)")


@dataclass(frozen=True)
class Lora:
    """LoRA adapters of linear layers: two matrices; their product is scaled by alpha / rank."""

    rank: int
    alpha: int
    dropout: float
    targets: str


class Mode(str):
    """The name of the part of a model that trains.

    ``full``: everything. ``last-N``: the last N layers of the encoder, and the head. ``head``: the
    head, in BERT the pooler and the output layer. ``classifier``: the output layer and other new
    layers of the head. ``lora`` and ``lora-last-N``: adapters in all or in the last N layers, and
    the layers that ``classifier`` trains.

    >>> Mode("last-2").trained_layers, Mode("head").trains_encoder, Mode("lora-last-3").is_lora
    (2, False, True)
    """

    def __new__(cls, name: str) -> "Mode":
        """Raise ``ValueError`` if there is no such mode."""
        if name not in ("full", "lora", *HEAD_MODES) and not _LAST.fullmatch(name):
            known = ("full", "last-N", "lora", "lora-last-N", *HEAD_MODES)
            raise ValueError(f"{name} is not one of {', '.join(known)}")
        return super().__new__(cls, name)

    @property
    def trains_encoder(self) -> bool:
        """Whether layers of the encoder train, not only the head."""
        return self not in HEAD_MODES

    @property
    def is_lora(self) -> bool:
        """Whether adapters train instead of the layers."""
        return self.startswith("lora")

    @property
    def trained_layers(self) -> int | None:
        """The number of layers that train, from the top; None for all of them."""
        if last := _LAST.fullmatch(self):
            return int(last[1])
        return None if self.trains_encoder else 0
