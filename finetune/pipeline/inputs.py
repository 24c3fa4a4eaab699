"""Texts become what a model's forward takes."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import Device
from finetune.evaluation.predict import InputsOf
from finetune.model.inputs import model_inputs
from finetune.model.load import Classifier
from finetune.tokenization.collate import collate_rows
from finetune.tokenization.encode import EncodedTexts, encode_texts


def encode_for(classifier: Classifier, texts: Sequence[str], *, max_length: int) -> EncodedTexts:
    """Encode texts for a model, within its positions."""
    max_tokens = min(max_length, classifier.max_tokens)
    return encode_texts(classifier.tokenizer, list(texts), max_length=max_tokens)


def padded_lengths_of(longest_tokens: int, classifier: Classifier, device: Device) -> list[int]:
    """Return the widths that batches may have on a device, within the model's positions."""
    padded_lengths = device.shapes.padded_lengths(longest_tokens)
    return sorted({min(padded_length, classifier.max_tokens) for padded_length in padded_lengths})


def inputs_maker(encoded: EncodedTexts, classifier: Classifier) -> InputsOf:
    """Return the function that makes a model's inputs from numbers of rows and a width."""
    takes_4d_mask = classifier.structure.takes_4d_mask

    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> dict[str, torch.Tensor]:
        return model_inputs(
            collate_rows(encoded, rows, padded_length=padded_length), takes_4d_mask=takes_4d_mask
        )

    return inputs_of
