"""Logits for many examples."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.devices.base import Device
from finetune.tokenization.buckets import plan_evaluation
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import ModelInputs


def predict_logits(
    model: nn.Module,
    examples: ModelInputs,
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    device: Device,
) -> NDArray[np.float32]:
    """Run examples through a model without dropout or graph.

    Args:
        model: On the device; left in evaluation mode.
        examples: One or more.
        padded_lengths: Those that a batch may have, ascending; the last holds the longest example.
        batch_size: Examples in one forward.
        device: Where the model is.

    Returns:
        float32 of shape [examples, classes], in the order of the examples.
    """
    model.eval()
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths
    )
    results = []
    with torch.inference_mode():
        for batch in batches:
            indices = batch.indices
            if device.shapes.pads_batches:
                indices = fill_batch(indices, batch_size=batch_size)
            inputs = examples.inputs_of(indices, batch.padded_length)
            logits = model(
                **{name: one.to(device.torch_device) for name, one in inputs.items()}
            ).logits
            results.append(logits[: len(batch.indices)].float())
    in_planned_order = torch.cat(results).cpu().numpy()
    in_order = np.empty_like(in_planned_order)
    in_order[np.concatenate([batch.indices for batch in batches])] = in_planned_order
    return in_order


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn logits into probabilities: both float32 of shape [examples, classes]."""
    result: NDArray[np.float32] = torch.from_numpy(logits).softmax(dim=-1).numpy()
    return result
