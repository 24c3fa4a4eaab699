"""What timing steps in fp32 and in bf16 found; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# bf16 has to gain so much, as no timing is exact.
_GAIN = 1.03
# Rounding makes 0.015 of BERT-base's logits, and a fault about 1. At the start of a run the loss
# hardly depends on the encoder, so that it is not the loss itself that is compared.
_MAX_ERROR = 0.1


@dataclass(frozen=True)
class PrecisionTiming:
    """What was measured in fp32 and in bf16.

    Args:
        work: What was timed: steps or, where that was enough, one product of matrices.
        seconds: Median time of the work, by precision.
        logits_error: Norm of the difference between both logits of the batch, after the steps and
            without dropout, over the norm of those in fp32; at most 1. None where bf16 is slower.
    """

    work: Literal["step", "product"]
    seconds: Mapping[str, float]
    logits_error: float | None = None

    @property
    def is_bf16_faster(self) -> bool:
        """Whether bf16 gains more than the noise of a timing."""
        return self.seconds["fp32"] > _GAIN * self.seconds["bf16"]

    @property
    def do_results_agree(self) -> bool:
        """Whether the logits, and so the losses, differ by no more than rounding."""
        return self.logits_error is None or self.logits_error <= _MAX_ERROR

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """The precision to train in."""
        return "bf16" if self.is_bf16_faster and self.do_results_agree else "fp32"

    def __str__(self) -> str:
        times = (f"{1e3 * one:,.1f} ms in {name}" for name, one in self.seconds.items())
        return f"one {self.work} takes {' and '.join(times)}"
