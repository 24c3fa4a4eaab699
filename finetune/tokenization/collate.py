"""Rows become tensors of one width, with an explicit mask."""

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.tokenization.encode import EncodedTexts


def collate_rows(
    texts: EncodedTexts, rows: NDArray[np.int64], *, padded_length: int
) -> dict[str, torch.Tensor]:
    """Lay rows out as a rectangle.

    Args:
        texts: Where the tokens are.
        rows: Numbers of the rows: int64 of shape [rows].
        padded_length: Tokens in a line of the result; at least the longest row.

    Returns:
        One tensor a column of the texts, int64 of shape [rows, width], and ``attention_mask``,
        bool of the same shape, true where a token is.
    """
    lengths = texts.lengths[rows]
    positions = np.arange(padded_length)
    first = (padded_length - lengths if texts.pads_left else np.zeros_like(lengths))[:, None]
    mask = (positions >= first) & (positions < first + lengths[:, None])
    sources = (texts.offsets[rows][:, None] + positions - first)[mask]
    tensors = {"attention_mask": torch.from_numpy(mask)}
    for name, tokens in texts.columns.items():
        lines = np.full(mask.shape, texts.padding[name], np.int64)
        lines[mask] = tokens[sources]
        tensors[name] = torch.from_numpy(lines)
    return tensors


def fill_rows(rows: NDArray[np.int64], *, batch_size: int) -> NDArray[np.int64]:
    """Repeat the last row until there are as many as in a full batch.

    For devices that pay for every new shape. A repeated row takes part in nothing: training gives
    it no weight, evaluation drops its result. A row of padding alone would do harm instead, since
    attention over nothing is NaN on MPS (pytorch#156707).
    """
    return np.concatenate([rows, np.repeat(rows[-1:], batch_size - len(rows))])
