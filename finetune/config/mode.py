"""Which part of a classifier trains; free of torch, for the configuration and the command line."""

import re

_NAME = re.compile(r"full|head|classifier|last-[1-9]\d*")


class Mode(str):
    """A training mode by its name: ``full``, ``last-N``, ``head`` or ``classifier``.

    ``full`` trains everything; ``last-N`` the last N layers of the encoder and the head; ``head``
    everything above the encoder, for BERT the pooler and the classifier; ``classifier`` the last
    linear layer, and whatever else of the head is new.

    Raises:
        ValueError: If there is no such mode.

    >>> Mode("last-2").trained_layers, Mode("head").trains_encoder
    (2, False)
    """

    def __new__(cls, name: str) -> "Mode":
        """Check the name."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name} is none of full, last-N, head and classifier")
        return super().__new__(cls, name)

    @property
    def trains_encoder(self) -> bool:
        """Whether a layer of the encoder trains, not the head alone."""
        return self not in ("head", "classifier")

    @property
    def freezes_layers(self) -> bool:
        """Whether a part of the model stays as it was pretrained."""
        return self != "full"

    @property
    def trained_layers(self) -> int | None:
        """The number of layers that train, from the top; None for all of them."""
        if self == "full":
            return None
        return int(self.removeprefix("last-")) if self.trains_encoder else 0
