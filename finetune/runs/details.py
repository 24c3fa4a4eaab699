"""What people want to see of a run beside its metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from finetune.tokenization.examples import Examples

MAX_BINS = 32


@dataclass(frozen=True)
class AutoTunedOption:
    """A value that was chosen by a measurement.

    Args:
        subject: An option, or something else that was chosen, in words.
        value: The chosen one.
        quantity: What was measured, with its unit, such as ``ms for one step``.
        measured: By value.
        note: What else led to it.
    """

    subject: str
    value: str
    quantity: str
    measured: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class TextLengths:
    """How many tokens the model reads at once of the texts of a split.

    Args:
        texts: Rows of the split.
        windows: All windows of these texts; None where each text is read at once.
        cut: Texts that have lost tokens.
        median: Tokens of a text or window, special tokens included.
        p95: All but 5% have at most so many.
        longest: The most.
        bin_tokens: The width of a bin of the histogram, in tokens.
        bins: Texts or windows by length: the first bin has those of 1 to ``bin_tokens`` tokens.
    """

    texts: int
    windows: int | None
    cut: int
    median: float
    p95: float
    longest: int
    bin_tokens: int
    bins: Sequence[int]

    @classmethod
    def of(cls, examples: "Examples") -> "TextLengths":
        """Return the lengths of a split."""
        lengths = examples.lengths
        width = -(-int(lengths.max()) // MAX_BINS)
        return cls(
            texts=len(examples.labels),
            windows=len(lengths) if examples.windows else None,
            cut=examples.truncated_texts,
            median=float(np.median(lengths)),
            p95=float(np.percentile(lengths, 95)),
            longest=int(lengths.max()),
            bin_tokens=width,
            bins=np.bincount((lengths - 1) // width).tolist(),
        )


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers of a part of a model train, and how many it has."""

    trained: int
    total: int


@dataclass(frozen=True)
class RunDetails:
    """What people want to see of a run beside its metrics.

    Args:
        choices: What was chosen by measurements.
        lengths: Of the texts, by split.
        parameters: How many numbers train and how many there are, by part of the model from the
            bottom.
    """

    choices: Sequence[AutoTunedOption]
    lengths: Mapping[str, TextLengths]
    parameters: Mapping[str, ParameterCount]
