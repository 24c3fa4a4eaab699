"""The result of a check of the machine; free of torch."""

from dataclasses import dataclass
from typing import Literal

# Twice BERT-base's 110 million weights, as many gradients, and AdamW's two moments, in fp32. In
# memory, activations take about as much again. On a disk, a checkpoint holds three of the four
# parts, and a second one is written before the first is deleted.
ROOM_FOR_BERT_BASE_BYTES = 2 * 110_000_000 * 4 * 4


@dataclass(frozen=True)
class Check:
    """One line of ``finetune doctor``; its status is ``failure`` if something can't work."""

    name: str
    status: Literal["ok", "warning", "failure"]
    finding: str
    remedy: str = ""

    @classmethod
    def warn_unless(cls, is_fine: bool, name: str, finding: str, remedy: str) -> "Check":
        """Return a check that is ok or a warning."""
        return cls(name, "ok", finding) if is_fine else cls(name, "warning", finding, remedy)
