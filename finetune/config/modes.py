"""The registry of modes: trainable parameters, the options that select them, and defaults.

To add a mode, register it in ``MODES`` and add its options to ``ModelConfig``. Modes are listed
nowhere else.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

# A head on stored features is trained until it stops improving, for at most 100 epochs and at most
# as many steps as 100 TREC epochs have. Larger data needs fewer epochs.
MAX_HEAD_EPOCHS = 100
MAX_HEAD_STEPS = 14_000
MIN_EPOCHS = 3
MAX_FEW_ROWS_EPOCHS = 40
FEW_ROWS_PATIENCE = 8
# For BERT-base, whose pooler ends in a mostly saturated tanh.
TYPICAL_OUTPUT_LAYER_INPUT = 0.7
_OF_TRAINED_ENCODERS = (
    "--train-layers", "--lora-rank", "--gradient-checkpointing", "--contrastive on",
)  # fmt: skip


@dataclass(frozen=True)
class ModeKind:
    """Properties shared by the modes of a kind, such as ``last-N``.

    If neither layers nor adapters are trained, the encoder is frozen: its features are stored, and
    a linear head is fitted by default.
    """

    trains: tuple[str, ...]  # parts of a ``Structure``
    options: tuple[str, ...] = ()  # ``ModelConfig`` fields that select it
    is_searched: bool = False  # by ``find-batch``, if no mode is selected
    learning_rate: float = 5e-5  # with a trained encoder, for the hidden size of BERT-base
    # Gains 0.4 points of accuracy on TREC, 5 gains 0.2 and 20 gains 0.5 points
    # (docs/measurements.md#tried-and-rejected).
    head_lr_multiplier: float = 10.0
    weight_decay: float = 0.01
    # Few rows need more epochs. With at least 250 steps, five datasets of 150 to 1,000 rows came
    # within a point of their best accuracy with 3, 10, 20 or 40 epochs. TREC needs 3
    # (docs/measurements.md#accuracy).
    min_steps: int = 250


_LORA = ModeKind(
    # Otherwise, new layers would keep their random initialization.
    ("adapters", "output_layer", "new"), ("lora_rank",), is_searched=True,
    # The learning rate of adapters and head, relative to other modes (docs/measurements.md#lora).
    learning_rate=20 * 5e-5, head_lr_multiplier=1.0, weight_decay=0.0, min_steps=400,
)  # fmt: skip
_HEAD = ModeKind(
    ("head",), ("freeze_core",), is_searched=True, learning_rate=5e-4, head_lr_multiplier=1.0,
    weight_decay=0.0,
)  # fmt: skip
# If the options of several kinds are set, the last one is the mode.
MODES = {
    "full": ModeKind(("embeddings", "layers", "final_norm", "head"), is_searched=True),
    "last-N": ModeKind(("layers", "final_norm", "head"), ("train_layers",)),
    "lora": _LORA,
    "lora-last-N": replace(_LORA, options=("lora_rank", "train_layers"), is_searched=False),
    "head": _HEAD,
    "classifier": replace(
        _HEAD, trains=("output_layer", "new"), options=("head",), is_searched=False
    ),
}
_NUMBER = re.compile(r"(?<=-)[1-9]\d*$")


class Mode(str):
    """Which parameters are trained.

    ``full``: everything. ``last-N``: the last N encoder layers and the head. ``head``: the head, in
    BERT the pooler and the output layer. ``classifier``: the output layer and other new layers of
    the head. ``lora`` and ``lora-last-N``: adapters in all or the last N layers, and the layers
    that ``classifier`` trains.

    >>> Mode("last-2").trained_layers, Mode("head").trains_encoder, Mode("lora-last-3").is_lora
    (2, False, True)
    """

    def __new__(cls, name: str) -> "Mode":
        """Create a mode, or raise ``ValueError`` for an unknown name."""
        if _NUMBER.sub("N", name) not in MODES or name.endswith("N"):
            raise ValueError(f"{name} is not one of {', '.join(MODES)}")
        return super().__new__(cls, name)

    @classmethod
    def of(cls, options: Any) -> "Mode":
        """Return the mode that a ``ModelConfig`` selects."""

        def is_set(option: str) -> bool:
            return bool(getattr(options, option) != getattr(type(options), option))

        *_, name = (name for name, kind in MODES.items() if all(map(is_set, kind.options)))
        return cls(name.replace("N", str(options.train_layers)))

    @property
    def kind(self) -> ModeKind:
        """Entry in the registry."""
        return MODES[_NUMBER.sub("N", self)]

    @property
    def trains_encoder(self) -> bool:
        """Whether encoder layers or adapters are trained, not only the head."""
        return not {"layers", "adapters"}.isdisjoint(self.kind.trains)

    @property
    def excludes(self) -> tuple[str, ...]:
        """Options that can't be combined with this mode."""
        return () if self.trains_encoder else _OF_TRAINED_ENCODERS

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained instead of layers."""
        return "adapters" in self.kind.trains

    @property
    def trained_layers(self) -> int | None:
        """The number of trained layers, from the top, or None for all of them."""
        if number := _NUMBER.search(self):
            return int(number[0])
        return None if self.trains_encoder else 0

    def learning_rate(self, *, hidden_size: int, structure: Any) -> float:
        """Return the default peak learning rate for a model ``Structure``."""
        if self.trains_encoder:
            return self.kind.learning_rate * 768 / hidden_size
        if "head" in self.kind.trains or structure.new - structure.output_layer:
            return self.kind.learning_rate
        # The MiniLM pooler output is a tenth as large as that of BERT-base. Without this factor,
        # one of them loses 3 points of accuracy. With layers below, the rate is far too high.
        return float(f"{7e-3 / (structure.output_layer_input or TYPICAL_OUTPUT_LAYER_INPUT):.2g}")

    def defaults(self, *, steps_per_epoch: int) -> dict[str, Any]:
        """Return the defaults that depend on the number of rows, by option."""
        if self.trains_encoder:
            epochs = min(math.ceil(self.kind.min_steps / steps_per_epoch), MAX_FEW_ROWS_EPOCHS)
            patience = FEW_ROWS_PATIENCE if epochs > MIN_EPOCHS else 0
            epochs = max(epochs, MIN_EPOCHS)
        else:
            epochs = max(1, min(MAX_HEAD_STEPS // steps_per_epoch, MAX_HEAD_EPOCHS))
            patience = math.ceil(epochs * 30 / 100)
        return {
            "num_train_epochs": float(epochs),
            "head_lr_multiplier": self.kind.head_lr_multiplier,
            "weight_decay": self.kind.weight_decay,
            "early_stopping_patience": patience,
        }
