"""Encoded texts become tensors of one padded length, with an explicit mask."""

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.tokenization.encode import EncodedTexts


def collate(
    texts: EncodedTexts, indices: NDArray[np.int64], *, padded_length: int
) -> dict[str, torch.Tensor]:
    """Pad the texts of some indices to one length, at least that of the longest.

    Returns:
        For each column of the texts int64 of shape [examples, tokens], and ``attention_mask``, bool
        of the same shape, true where a token is.
    """
    starts = texts.offsets[indices]
    lengths = texts.offsets[indices + 1] - starts
    positions = np.arange(padded_length)
    first = (padded_length - lengths if texts.pads_left else np.zeros_like(lengths))[:, None]
    mask = (positions >= first) & (positions < first + lengths[:, None])
    sources = (starts[:, None] + positions - first)[mask]
    tensors = {"attention_mask": torch.from_numpy(mask)}
    for name, tokens in texts.columns.items():
        padded = np.full(mask.shape, texts.padding[name], np.int64)
        padded[mask] = tokens[sources]
        tensors[name] = torch.from_numpy(padded)
    return tensors


def prepare_mask(
    tensors: dict[str, torch.Tensor], *, takes_4d_mask: bool
) -> dict[str, torch.Tensor]:
    """Give the attention mask the form that the model reads without asking the device.

    It is bool of shape [examples, tokens] before; as a 4-D mask, [examples, 1, 1, tokens].
    """
    mask = tensors["attention_mask"]
    prepared = mask[:, None, None, :] if takes_4d_mask else mask.long()
    return {**tensors, "attention_mask": prepared}


def fill_batch(indices: NDArray[np.int64], *, batch_size: int) -> NDArray[np.int64]:
    """Repeat the last index until the batch is full.

    For devices that pay for every new shape. A repeated example takes part in nothing: training
    gives it no weight, evaluation drops its result. An example of padding alone would do harm,
    since attention over nothing is NaN on MPS (pytorch#156707).
    """
    return np.concatenate([indices, np.repeat(indices[-1:], batch_size - len(indices))])
