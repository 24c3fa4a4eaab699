"""Computes the logits of many examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune import distributed
from finetune.devices.base import BatchSize, Device
from finetune.errors import LossNotFiniteError
from finetune.tokenization.examples import ModelInputs, fill_batch, plan_evaluation


@dataclass(frozen=True)
class Predictor:
    """Predicts with a model, identical on all ranks, in batches that fit in memory."""

    model: nn.Module
    device: Device
    precision: str
    batch_size: BatchSize

    def logits(
        self, examples: ModelInputs, *, padded_lengths: Sequence[int]
    ) -> NDArray[np.float32]:
        """Compute the logits of examples: float32 of shape [examples, classes], in order.

        Logits of windows are averaged. Ranks share the work, and each rank gets all logits.
        """
        order = np.argsort(-examples.lengths, kind="stable")
        # Each process gets the same number of examples per length, and thus about the same work.
        count = distributed.world_size()
        parts = [order[first::count] for first in range(count)]
        indices = parts[distributed.rank()]

        predict = partial(self.part_logits, examples.subset(indices), padded_lengths)
        # Longest batches come first, so that little work is lost if one doesn't fit.
        rank_logits = self.batch_size.retry_on_out_of_memory(predict) if len(indices) else None
        gathered = [part for part in distributed.gather(rank_logits) if part is not None]
        logits = np.empty((len(order), gathered[0].shape[1]), np.float32)
        for part, part_logits in zip(parts, gathered, strict=False):
            logits[part] = part_logits
        if not np.isfinite(logits).all():
            raise LossNotFiniteError(
                "the logits of the model are NaN or infinite",
                remedy="train it with a lower --learning-rate, or with --precision fp32",
            )
        return examples.average(logits)

    @torch.inference_mode()
    def part_logits(
        self, examples: ModelInputs, padded_lengths: Sequence[int], batch_size: int
    ) -> NDArray[np.float32]:
        """Compute the logits of this rank's part: float32 [sequences, classes], in order."""
        if self.model.training:  # the call takes a millisecond
            self.model.eval()
        lengths, device = examples.lengths, self.device
        batches = plan_evaluation(lengths, batch_size=batch_size, padded_lengths=padded_lengths)
        # One small tensor per batch would fragment the heap.
        logits, done = torch.empty(0), 0
        with device.autocast(self.precision):  # once, because it keeps the weights in 16 bits
            for batch in batches:
                count = len(batch.indices)
                filled = device.shapes.evaluated_examples(count, batch_size=batch_size)
                indices = fill_batch(batch.indices, batch_size=filled)
                inputs = examples.inputs_of(indices, batch.padded_length)
                inputs = {name: device.copy(tensor) for name, tensor in inputs.items()}
                batch_logits = self.model(**inputs).logits
                if not done:
                    shape = (len(lengths), batch_logits.shape[-1])
                    logits = batch_logits.new_empty(shape, dtype=torch.float32)
                logits[done : done + count] = batch_logits[:count]
                done += count
        planned = logits.cpu().numpy()
        in_order = np.empty_like(planned)
        in_order[np.concatenate([batch.indices for batch in batches])] = planned
        return in_order
