"""Which part of a model trains: the modes, and the heads; free of torch.

A new head is an entry of ``HEADS`` with its name in ``HeadName``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

HeadName = Literal["whole", "classifier"]
NEW_HEAD_LEARNING_RATE = 5e-4
# BERT-base's pooler ends in a tanh that is mostly far from 0.
TYPICAL_OUTPUT_LAYER_INPUT = 0.7


@dataclass(frozen=True)
class Head:
    """A part above the encoder, and how it trains over a frozen one.

    The functions take a ``model.structure.Structure``.
    """

    mode: str
    # Whether it does so even without --freeze-core.
    freezes_encoder: bool
    trained_names: Callable[[Any], frozenset[str]]
    learning_rate: Callable[[Any], float]


def _output_layer_and_new(structure: Any) -> frozenset[str]:
    # What is new would otherwise stay as random as it was drawn.
    return structure.output_layer | structure.new  # type: ignore[no-any-return]


def _learning_rate_of_linear_model(structure: Any) -> float:
    # The input from MiniLM's pooler is a tenth of BERT-base's: one rate for both costs the other 3
    # points of accuracy. It is far too high if layers beneath the output layer train too.
    if structure.new - structure.output_layer:
        return NEW_HEAD_LEARNING_RATE
    return float(f"{7e-3 / (structure.output_layer_input or TYPICAL_OUTPUT_LAYER_INPUT):.2g}")


HEADS: Mapping[HeadName, Head] = {
    "whole": Head(
        "head",
        freezes_encoder=False,
        trained_names=lambda structure: structure.head,
        learning_rate=lambda _: NEW_HEAD_LEARNING_RATE,
    ),
    "classifier": Head(
        "classifier",
        freezes_encoder=True,
        trained_names=_output_layer_and_new,
        learning_rate=_learning_rate_of_linear_model,
    ),
}
HEAD_OF_MODE = {head.mode: head for head in HEADS.values()}


class Mode(str):
    """The name of what trains.

    ``full``: everything; ``last-N``: the last N layers of the encoder, and the head; ``head``:
    everything above the encoder, for BERT the pooler and the classifier; ``classifier``: the output
    layer, and whatever else of the head is new.

    >>> Mode("last-2").trained_layers, Mode("head").trains_encoder
    (2, False)
    """

    def __new__(cls, name: str) -> "Mode":
        """Raise ``ValueError`` if there is no such mode."""
        if name not in ("full", *HEAD_OF_MODE) and not re.fullmatch(r"last-[1-9]\d*", name):
            raise ValueError(f"{name} is none of full, last-N, {' and '.join(HEAD_OF_MODE)}")
        return super().__new__(cls, name)

    @property
    def head(self) -> Head | None:
        """The head that trains over a frozen encoder, None in other modes."""
        return HEAD_OF_MODE.get(self)

    @property
    def trains_encoder(self) -> bool:
        """Whether a layer of the encoder trains, not the head alone."""
        return self.head is None

    @property
    def trained_layers(self) -> int | None:
        """The number of layers that train, from the top; None for all of them."""
        if self == "full":
            return None
        return int(self.removeprefix("last-")) if self.trains_encoder else 0
