"""A few evaluations and steps on a device, and the tensors that result."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from finetune.config.mode import Mode
from finetune.devices.base import Device
from finetune.doctor.models import CLASSES, max_tokens
from finetune.evaluation.predict import predict_logits
from finetune.model.freeze import freeze_parameters
from finetune.model.structure import Structure, find_structure
from finetune.tasks.single import cross_entropy
from finetune.tokenization.buckets import Batch, choose_padded_lengths
from finetune.tokenization.encode import random_texts
from finetune.tokenization.examples import Examples, ModelInputs, inputs_of_texts
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.schedule import Schedule
from finetune.training.training_state import Hyperparameters, TrainingState, prepare_training

# Around the blocks of 8 and 32 tokens that attention's kernels work on.
_LENGTHS = (1, 8, 9, 31, 32, 33, 64)
_BATCH_SIZES = (1, 7, 32)
_SEED = 0
_EXAMPLES = 8
_UPDATES = 10
# Twenty times that of a run, so that what changes stands out from the rounding of the weights.
_LEARNING_RATE = 1e-3
_MAX_GRAD_NORM = 1.0
# Gradient scaling starts at 2¹⁶ and halves with every step that it skips.
_MAX_TRIES = 17

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rehearsal:
    """What each device is to compute with its copy of a model.

    Args:
        model: On the CPU.
        structure: Of the model.
        lengths: Tokens of the longest text of a batch, ascending.
        batch_sizes: Examples in one forward.
    """

    model: PreTrainedModel
    structure: Structure
    lengths: Sequence[int]
    batch_sizes: Sequence[int]

    def on(self, device: Device, *, precision: str) -> Iterator[tuple[str, Tensors]]:
        """Yield each part's name and tensors, on the CPU and in fp32, one part after the other.

        ``evaluation`` has the logits of batches; ``logits``, ``loss`` and ``gradients`` are those
        of the first step; ``1 step`` and ``10 steps`` are the changes of the parameters.
        There is no dropout: devices draw different random numbers.
        """
        device.choose_attention(longest_tokens=self.lengths[-1])
        training_state = _prepare(copy.deepcopy(self.model), self.structure, device, precision)
        evaluation = {
            f"{size} examples of up to {tokens} tokens": self._predict(training_state, size, tokens)
            for tokens, size in product(self.lengths, self.batch_sizes)
        }
        yield "evaluation", evaluation
        examples = self._examples()
        first = _cut(examples, device, number=0)
        logits: torch.Tensor = training_state.model(**first.inputs).logits.detach()
        yield "logits", {"logits": logits.cpu()}
        gradients: Tensors = {}
        loss = _update(
            training_state,
            first,
            number=0,
            before_step=lambda: gradients.update(_gradients(training_state)),
        )
        yield "loss", {"loss": loss.cpu()[None]}
        yield "gradients", gradients
        yield "1 step", self._changes(training_state.model)
        for number in range(1, _UPDATES):
            _update(training_state, _cut(examples, device, number=number), number=number)
        yield f"{_UPDATES} steps", self._changes(training_state.model)

    def _predict(self, training_state: TrainingState, size: int, tokens: int) -> torch.Tensor:
        device = training_state.device
        # One example more, so that there is a last batch that is not full.
        inputs = self._inputs(_random_lengths(size + 1, tokens))
        padded_lengths = choose_padded_lengths(inputs.lengths, device.shapes)
        logits = predict_logits(
            training_state.model,
            inputs,
            padded_lengths=sorted({min(one, self.lengths[-1]) for one in padded_lengths}),
            batch_size=size,
            device=device,
        )
        return torch.from_numpy(logits)

    def _examples(self) -> Examples:
        count = _UPDATES * _EXAMPLES
        lengths = _random_lengths(count, self.lengths[-1])
        labels = np.random.default_rng(_SEED).integers(CLASSES, size=count)
        inputs_of = self._inputs(lengths).inputs_of
        return Examples(inputs_of, lengths, labels, np.ones(count, np.float32))

    def _inputs(self, lengths: NDArray[np.int64]) -> ModelInputs:
        config = self.model.config
        texts = random_texts(
            lengths,
            vocabulary_size=config.vocab_size,
            padding_id=config.pad_token_id or 0,
            seed=_SEED,
        )
        return inputs_of_texts(texts, takes_4d_mask=self.structure.takes_4d_mask)

    def _changes(self, model: nn.Module) -> Tensors:
        before = dict(self.model.named_parameters())
        return {
            name: one.detach().cpu() - before[name].detach()
            for name, one in model.named_parameters()
        }


def plan_rehearsal(model: PreTrainedModel, *, mode: Mode, largest_batch: int) -> Rehearsal:
    """Plan what a classifier on the CPU is to compute; freeze it by a mode, in place.

    The matrices of its last layer are then stored transposed, as loaded weights may be: MPS once
    silently skipped in-place operations on such tensors (pytorch#118115).

    Raises:
        ConfigurationInvalid: If the encoder has fewer than N layers.
        ModelUnsupported: If it has no encoder of layers, or no linear classifier on top.
    """
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=mode)
    model.train(False)
    for parameter in map(model.get_parameter, structure.layers[-1]):
        if parameter.ndim == 2:
            parameter.data = parameter.detach().T.contiguous().T
    return Rehearsal(
        model,
        structure,
        lengths=sorted({max_tokens(model, wanted=tokens) for tokens in _LENGTHS}),
        batch_sizes=sorted({*(min(one, largest_batch) for one in _BATCH_SIZES), largest_batch}),
    )


def _prepare(
    model: PreTrainedModel, structure: Structure, device: Device, precision: str
) -> TrainingState:
    training_state = prepare_training(
        model,
        head=structure.head,
        device=device,
        precision=precision,
        losses=cross_entropy,
        hyperparameters=Hyperparameters(
            optimizer="adamw",
            schedule=Schedule(peak=_LEARNING_RATE, warmup_steps=0, total_steps=_UPDATES),
            head_lr_multiplier=1.0,
            weight_decay=0.01,
            max_grad_norm=_MAX_GRAD_NORM,
        ),
    )
    # AdamW divides gradients by their own size, which turns one that is mere rounding into a full
    # step. A divisor of at least the mean gradient's size keeps such steps small.
    trained = sum(one.numel() for one in training_state.trained_parameters().values())
    for group in training_state.optimizer.param_groups:
        group["eps"] = _MAX_GRAD_NORM / math.sqrt(trained)
    return training_state


def _random_lengths(count: int, longest: int) -> NDArray[np.int64]:
    """Return lengths of which the first is the longest."""
    lengths = np.random.default_rng(_SEED).integers(1, longest + 1, size=count)
    lengths[0] = longest
    return lengths


def _cut(examples: Examples, device: Device, *, number: int) -> MicroBatch:
    """Return the examples of a step in one micro-batch, padded to the longest of all."""
    indices = np.arange(number * _EXAMPLES, (number + 1) * _EXAMPLES)
    batch = Batch(indices, padded_length=int(examples.lengths.max()))
    [micro_batch] = cut_batch(examples, batch, batch_size=_EXAMPLES, device=device)
    assert isinstance(micro_batch, MicroBatch), "no text has windows"
    return micro_batch


def _update(
    training_state: TrainingState,
    micro_batch: MicroBatch,
    *,
    number: int,
    before_step: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Take a step, again while gradient scaling skips it, and return its loss."""
    for _ in range(_MAX_TRIES):
        skipped = training_state.accelerator.skipped_steps()
        take = training_state.prepare_step([micro_batch])
        before_step()
        loss = take(number)
        if training_state.accelerator.skipped_steps() == skipped:
            break
    return loss


def _gradients(training_state: TrainingState) -> Tensors:
    """Return the gradients of a step that is not captured, clipped, on the CPU."""
    # Some devices leave the clipping to the optimizer's step.
    scale = getattr(training_state.optimizer, "grad_scale", None)
    divisor = 1.0 if scale is None else scale.cpu()
    return {
        name: torch.zeros_like(one, device="cpu") if one.grad is None else one.grad.cpu() / divisor
        for name, one in training_state.model.named_parameters()
    }
