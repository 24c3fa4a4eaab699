"""A model with random weights, for measuring training steps at any batch size."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from finetune.batch_finder.results import Case
from finetune.config.schema import Config, change_options
from finetune.devices.base import Device, move_to_device
from finetune.errors import ModelUnsupportedError
from finetune.events import Trial
from finetune.model.features import FrozenLayers, split_frozen
from finetune.model.lora import add_adapters
from finetune.model.mean_pooling import compute_only_first_token
from finetune.model.structure import (
    Structure,
    enable_gradient_checkpointing,
    find_structure,
    freeze_parameters,
    set_training,
)
from finetune.tasks.choose import task_of_shape
from finetune.tokenization.examples import Batch, Examples, Inputs, prepare_mask
from finetune.training.micro_batches import cut_batch
from finetune.training.plan import Plan
from finetune.training.trainer import Trainer

# Shorter timings mostly measure other programs or the wake-up of an idle GPU.
_MIN_TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class TrialModel:
    """Trains like ``run``, on random examples of the largest padded length.

    With ``frozen_layers``, ``trainer`` contains only the trainable layers. ``features`` are for
    one example: [1, tokens, hidden], or [1, 1, hidden] if they are pooled.
    """

    case: Case
    trainer: Trainer
    vocabulary_size: int
    takes_4d_mask: bool
    frozen_layers: FrozenLayers | None = None
    features: torch.Tensor | None = None

    def begin(self) -> None:
        """Reset everything except the weights to the start of a run."""
        self.trainer.discard_gradients()
        self.trainer.optimizer.state.clear()
        set_training(self.trainer.model)

    def take_step(self, *, batch_size: int) -> None:
        """Take one step of a single micro-batch, or extract the features of one batch."""
        if self.case.part == "features":
            self.extract(batch_size=batch_size)
        else:
            self._train(batch_size)

    def extract(self, *, batch_size: int) -> torch.Tensor:
        """Extract the features of one batch, on the CPU."""
        assert self.frozen_layers
        return self.frozen_layers.features(self._tokens(batch_size))

    def evaluate(self, *, batch_size: int) -> None:
        """Predict one batch, like the validation between steps."""
        if self.case.part == "features":
            self._train(1)  # creates the optimizer state
        self.trainer.optimizer.zero_grad(set_to_none=True)
        examples, padded_lengths = self._examples(batch_size), [self.case.padded_length]
        self.trainer.predictor.part_logits(examples, padded_lengths, batch_size)

    def _train(self, batch_size: int) -> None:
        batch = Batch(np.arange(batch_size), self.case.padded_length)
        examples, device = self._examples(batch_size), self.trainer.device
        self.trainer.take_step(0, cut_batch(examples, batch, batch_size=batch_size, device=device))

    def _examples(self, batch_size: int) -> Examples:
        task = task_of_shape(self.case.task, outputs=self.case.classes)
        lengths = np.full(batch_size, self.case.padded_length)
        labels = task.sample_labels(batch_size)
        return Examples(self._inputs_of, lengths, labels, np.ones(batch_size, np.float32))

    def _inputs_of(self, rows: NDArray[np.int64], _: int) -> Inputs:
        if self.features is None:
            return self._tokens(len(rows))
        return self._with_mask("inputs_embeds", self.features.repeat(len(rows), 1, 1))

    def _tokens(self, rows: int) -> Inputs:
        tokens = torch.randint(self.vocabulary_size, (rows, self.case.padded_length))
        return self._with_mask("input_ids", tokens)

    def _with_mask(self, name: str, tensor: torch.Tensor) -> Inputs:
        mask = torch.ones(tensor.shape[:2], dtype=torch.bool)
        # Mask a token, because attention without masked tokens is cheaper.
        mask[0, -1] = tensor.shape[1] == 1
        inputs = {name: tensor, "attention_mask": mask}
        return prepare_mask(inputs, takes_4d_mask=self.takes_4d_mask)


def build_trial_model(case: Case, *, device: Device) -> TrialModel:
    """Build the model of a case and prepare it for steps."""
    device.choose_attention(longest_tokens=case.padded_length)
    # Random weights take seconds on the CPU, but splitting a model needs them there.
    is_made_there = case.part == "whole" and not device.memory.is_shared
    config = AutoConfig.for_model(**case.architecture)
    config.num_labels = case.classes
    auto: Any = AutoModelForSequenceClassification
    with device.torch_device if is_made_there else torch.device("cpu"):
        model = auto.from_config(config, dtype=torch.float32)
    # The weights of a frozen layer affect neither memory nor time.
    structure = find_structure(model, has_mean_layer=case.has_mean_layer)
    if case.has_mean_layer:
        compute_only_first_token(model)
    if case.lora:
        structure = add_adapters(model, structure, case.lora, mode=case.mode)
    if case.gradient_checkpointing:
        enable_gradient_checkpointing(model, device)
    if case.part == "whole":
        return prepare_trial_model(case, model, structure, device=device)
    freeze_parameters(model, structure, mode=case.mode)
    layers = split_frozen(
        model, device=device, precision=case.precision, takes_4d_mask=structure.takes_4d_mask
    )
    if layers is None:
        raise ModelUnsupportedError(
            f"the frozen layers of {type(model).__name__} can't be split off",
            remedy="use --no-feature-cache",
        )
    # The parts share parameters, but not buffers.
    move_to_device(model, device.torch_device)
    trial = prepare_trial_model(case, model, structure, device=device, frozen_layers=layers)
    features = trial.extract(batch_size=1)
    return replace(trial, features=features if layers.per_token else features[:, None])


def prepare_trial_model(
    case: Case,
    model: PreTrainedModel,
    structure: Structure,
    *,
    device: Device,
    frozen_layers: FrozenLayers | None = None,
) -> TrialModel:
    """Prepare a model of the case's architecture for steps, in place, by default as a whole."""
    freeze_parameters(model, structure, mode=case.mode)
    # Other hyperparameters affect neither memory nor time.
    options = case.mode.defaults(steps_per_epoch=1) | {"precision": case.precision}
    options["learning_rate"] = 1e-5
    trainer = Trainer(
        frozen_layers.trainable if frozen_layers else model,
        Plan(change_options(Config(), options), total_steps=1),
        task=task_of_shape(case.task, outputs=case.classes),
        device=device,
        head=structure.head,
        frozen_in_bf16=case.mode.is_lora,
    )
    vocabulary_size = model.config.vocab_size
    return TrialModel(case, trainer, vocabulary_size, structure.takes_4d_mask, frozen_layers)


def measure(model: TrialModel, *, batch_size: int, budget_bytes: int) -> Trial:
    """Take at least two steps, three on a GPU, and evaluate one batch, of one size.

    Each call starts with only the weights, like a run. Allocations beyond the budget raise
    whatever PyTorch raises. The peak is None if this process can't measure it.
    """
    device, memory = model.trainer.device, model.trainer.device.memory
    model.begin()
    memory.release()
    memory.set_memory_limit(budget_bytes)
    memory.reset_peak()
    # The first step includes allocations, optimizer state and kernel compilation.
    model.take_step(batch_size=batch_size)
    # Use the best of several timings, each twice as long as the previous one.
    steps = 1 if device.is_reference else 2
    best_rate = timed_seconds = 0.0
    while timed_seconds < _MIN_TIMED_SECONDS:
        seconds = device.time_calls(lambda: model.take_step(batch_size=batch_size), calls=steps)
        best_rate = max(best_rate, steps * batch_size / seconds)
        timed_seconds += seconds
        steps *= 2
    model.evaluate(batch_size=batch_size)
    return Trial(batch_size, "fits", memory.peak_reserved_bytes(), best_rate)
