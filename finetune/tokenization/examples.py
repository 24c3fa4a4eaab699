"""What a model reads of each example, and what training needs beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.tokenization.collate import collate, prepare_mask
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.windows import Windows

Inputs = dict[str, torch.Tensor]
InputsOf = Callable[[NDArray[np.int64], int], Inputs]


@dataclass(frozen=True)
class ModelInputs:
    """Examples as the model reads them, collated when asked for.

    Args:
        inputs_of: Returns the keyword arguments of the model's forward for the indices of some
            examples, or windows, and a padded length: CPU tensors of shape [examples, ...].
        lengths: Tokens of each example, or window: int64 of shape [examples].
        windows: Which windows are of which example; None where the model reads each at once.
    """

    inputs_of: InputsOf
    lengths: NDArray[np.int64]
    windows: Windows | None = field(default=None, kw_only=True)

    @property
    def longest(self) -> NDArray[np.int64]:
        """Tokens that the model reads at once of each example: int64 of shape [examples]."""
        return self.windows.longest(self.lengths) if self.windows else self.lengths

    def rows_of(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, for ``inputs_of``, of all that the model reads of some examples."""
        return self.windows.of(examples) if self.windows else examples

    def some(self, rows: NDArray[np.int64]) -> "ModelInputs":
        """Return some of what the model reads at once, in this order, each by itself."""
        return ModelInputs(
            lambda indices, padded_length: self.inputs_of(rows[indices], padded_length),
            self.lengths[rows],
        )

    def pool(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of examples from those of all that the model reads of them."""
        return self.windows.pool(logits) if self.windows else logits


@dataclass(frozen=True)
class Examples(ModelInputs):
    """Examples to train on.

    Args:
        labels: As the task's loss reads them: of shape [examples, ...].
        weights: What each example counts in the loss: float32 of shape [examples].
        truncated_texts: How many have lost tokens.
    """

    labels: NDArray[Any]
    weights: NDArray[np.float32]
    truncated_texts: int = field(default=0, kw_only=True)

    def of_rows(self) -> "Examples":
        """Return all that the model reads as examples of their own, with their texts' labels."""
        if self.windows is None:
            return self
        texts = np.repeat(np.arange(len(self.labels)), self.windows.counts)
        labels, weights = self.labels[texts], self.weights[texts]
        return replace(self, labels=labels, weights=weights, windows=None)


def inputs_of_texts(texts: EncodedTexts, *, takes_4d_mask: bool) -> ModelInputs:
    """Return encoded texts as a model reads them, with a mask as ``prepare_mask`` makes it."""

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        tensors = collate(texts, indices, padded_length=padded_length)
        return prepare_mask(tensors, takes_4d_mask=takes_4d_mask)

    return ModelInputs(inputs_of, texts.lengths, windows=texts.windows)


def join_inputs(parts: Sequence[ModelInputs]) -> ModelInputs:
    """Return the examples of several parts as one."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.lengths) for part in parts)])

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        owners = np.searchsorted(starts, indices, side="right") - 1
        collated = [
            parts[owner].inputs_of(indices[owners == owner] - starts[owner], padded_length)
            for owner in np.unique(owners)
        ]
        order = torch.from_numpy(np.argsort(np.argsort(owners, kind="stable")))
        return {name: torch.cat([one[name] for one in collated])[order] for name in collated[0]}

    lengths = np.concatenate([part.lengths for part in parts])
    found = [part.windows for part in parts if part.windows]
    windows = replace(found[0], counts=np.concatenate([w.counts for w in found])) if found else None
    return ModelInputs(inputs_of, lengths, windows=windows)
