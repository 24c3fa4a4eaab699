"""Logits for many examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.devices.base import Device
from finetune.devices.batch_size import BatchSize
from finetune.devices.precision import autocast
from finetune.distributed.processes import ALONE, Processes
from finetune.errors import LossNotFinite
from finetune.tokenization.buckets import plan_evaluation
from finetune.tokenization.examples import ModelInputs, fill_batch


@dataclass(frozen=True)
class Predictor:
    """A model that answers in one precision, in batches that fit the memory.

    Args:
        model: On the device.
        device: Where it is.
        precision: ``fp32``, ``bf16`` or ``fp16``: of all metrics of a run, whoever computes them.
        batch_size: Examples in one forward; fewer after memory ran out.
        processes: Those that share the work, each with the same model.
    """

    model: nn.Module
    device: Device
    precision: str
    batch_size: BatchSize
    processes: Processes = ALONE

    def logits(
        self, examples: ModelInputs, *, padded_lengths: Sequence[int]
    ) -> NDArray[np.float32]:
        """Return the logits of examples: float32 of shape [examples, classes], in their order.

        Those of windows are pooled. Several processes share the work, and each gets all logits.

        Args:
            examples: One or more.
            padded_lengths: Those that a batch may have, ascending.

        Raises:
            LossNotFinite: If a logit is NaN or infinite.
            BatchDoesNotFit: If not even one example fits the device's memory.
        """
        order = np.argsort(-examples.lengths, kind="stable")
        # Of one length each process gets as many, so that all take about as long.
        shares = [order[first :: self.processes.count] for first in range(self.processes.count)]
        own = shares[self.processes.index]
        found = self._predict(examples.subset(own), padded_lengths) if len(own) else None
        pieces = [one for one in self.processes.gather(found) if one is not None]
        logits = np.empty((len(order), pieces[0].shape[1]), np.float32)
        for share, piece in zip(shares, pieces, strict=False):
            logits[share] = piece
        if not np.isfinite(logits).all():
            raise LossNotFinite(
                "the model's logits are NaN or infinite",
                remedy="train it with a lower --learning-rate, or with --precision fp32",
            )
        return examples.aggregate(logits)

    def _predict(self, examples: ModelInputs, padded_lengths: Sequence[int]) -> NDArray[np.float32]:
        def predict(batch_size: int) -> NDArray[np.float32]:
            with autocast(self.device, precision=self.precision):
                return predict_logits(
                    self.model,
                    examples,
                    padded_lengths=padded_lengths,
                    batch_size=batch_size,
                    device=self.device,
                )

        # The longest examples come first, so that little is lost where memory runs out.
        return self.batch_size.retry_on_out_of_memory(predict)


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
    in_planned_order, done = torch.empty(0), 0
    with torch.inference_mode():
        for batch in batches:
            indices = batch.indices
            if device.shapes.pads_batches:
                filled = max(batch_size, device.shapes.min_examples)
                indices = fill_batch(indices, batch_size=filled)
            inputs = examples.inputs_of(indices, batch.padded_length)
            logits = model(**{name: device.copy(one) for name, one in inputs.items()}).logits
            if not done:
                # One for all: a small tensor kept of each batch would stand in the way of what the
                # C library has to give the next, and memory would grow with the batches.
                shape = (len(examples.lengths), logits.shape[-1])
                in_planned_order = logits.new_empty(shape, dtype=torch.float32)
            in_planned_order[done : done + len(batch.indices)] = logits[: len(batch.indices)]
            done += len(batch.indices)
    found = in_planned_order.cpu().numpy()
    in_order = np.empty_like(found)
    in_order[np.concatenate([batch.indices for batch in batches])] = found
    return in_order
