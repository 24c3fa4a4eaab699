"""Which part of a model trains."""

import re
from typing import Literal

HeadName = Literal["whole", "classifier"]
# Modes that leave the encoder as it is.
HEAD_MODES = ("head", "classifier")


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
        if name not in ("full", *HEAD_MODES) and not re.fullmatch(r"last-[1-9]\d*", name):
            raise ValueError(f"{name} is none of full, last-N, {' and '.join(HEAD_MODES)}")
        return super().__new__(cls, name)

    @property
    def trains_encoder(self) -> bool:
        """Whether a layer of the encoder trains, not the head alone."""
        return self not in HEAD_MODES

    @property
    def trained_layers(self) -> int | None:
        """The number of layers that train, from the top; None for all of them."""
        if self == "full":
            return None
        return int(self.removeprefix("last-")) if self.trains_encoder else 0
