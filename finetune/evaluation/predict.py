"""Logits for many rows."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.devices.base import Device
from finetune.tokenization.buckets import plan_evaluation
from finetune.tokenization.collate import fill_rows

InputsOf = Callable[[NDArray[np.int64], int], dict[str, torch.Tensor]]


def predict_logits(
    model: nn.Module,
    inputs_of: InputsOf,
    lengths: NDArray[np.int64],
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    device: Device,
) -> NDArray[np.float32]:
    """Run rows through a model without dropout or graph.

    Args:
        model: On the device; left in evaluation mode.
        inputs_of: Makes the model's inputs from numbers of rows and a width, on the CPU.
        lengths: Tokens of each row: int64 of shape [rows], not empty.
        padded_lengths: Those that a batch may have, ascending; the last holds the longest row.
        batch_size: Rows in one forward.
        device: Where the model is.

    Returns:
        float32 of shape [rows, classes], in the order of the rows.
    """
    model.eval()
    batches = plan_evaluation(lengths, batch_size=batch_size, padded_lengths=padded_lengths)
    results = []
    with torch.inference_mode():
        for batch in batches:
            rows = batch.rows
            if device.shapes.pads_batches:
                rows = fill_rows(rows, batch_size=batch_size)
            inputs = inputs_of(rows, batch.padded_length)
            logits = model(
                **{name: one.to(device.torch_device) for name, one in inputs.items()}
            ).logits
            results.append(logits[: len(batch.rows)].float())
    in_planned_order = torch.cat(results).cpu().numpy()
    logits_by_row = np.empty_like(in_planned_order)
    logits_by_row[np.concatenate([batch.rows for batch in batches])] = in_planned_order
    return logits_by_row


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn logits into probabilities: both float32 of shape [rows, classes]."""
    result: NDArray[np.float32] = torch.from_numpy(logits).softmax(dim=-1).numpy()
    return result
