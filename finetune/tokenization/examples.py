"""What a model reads of each example, and what training needs beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.tokenization.collate import collate, prepare_mask
from finetune.tokenization.encode import EncodedTexts

Inputs = dict[str, torch.Tensor]
InputsOf = Callable[[NDArray[np.int64], int], Inputs]


@dataclass(frozen=True)
class ModelInputs:
    """Examples as the model reads them, collated when asked for.

    Args:
        inputs_of: Returns the keyword arguments of the model's forward for the indices of some
            examples and a padded length: CPU tensors of shape [examples, ...].
        lengths: Tokens of each example: int64 of shape [examples].
    """

    inputs_of: InputsOf
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Examples(ModelInputs):
    """Examples to train on.

    Args:
        labels: As the task's loss reads them: of shape [examples, ...].
        weights: What each example counts in the loss: float32 of shape [examples].
    """

    labels: NDArray[Any]
    weights: NDArray[np.float32]


def inputs_of_texts(texts: EncodedTexts, *, takes_4d_mask: bool) -> ModelInputs:
    """Return encoded texts as a model reads them, with a mask as ``prepare_mask`` makes it."""

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        tensors = collate(texts, indices, padded_length=padded_length)
        return prepare_mask(tensors, takes_4d_mask=takes_4d_mask)

    return ModelInputs(inputs_of, texts.lengths)
