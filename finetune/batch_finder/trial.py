"""A model with random weights that takes the updates of training at any batch size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from finetune.batch_finder.case import Case
from finetune.devices.base import Device, place
from finetune.errors import ModelUnsupported
from finetune.evaluation.predict import predict_logits
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs, split_frozen
from finetune.model.freeze import freeze_parameters, set_training
from finetune.model.structure import Structure, find_structure
from finetune.tokenization.buckets import Batch
from finetune.tokenization.collate import prepare_mask
from finetune.tokenization.examples import Examples, Inputs, InputsOf, ModelInputs
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.schedule import Schedule
from finetune.training.training_state import TrainingState, prepare_training


@dataclass(frozen=True)
class Trial:
    """Training as ``run`` does it, on random rows of the greatest width.

    Args:
        training_state: The model on its device, and its optimizer.
        inputs_of: Makes the model's inputs.
        classes: How many it tells apart.
        padded_length: Tokens in a row.
    """

    training_state: TrainingState
    inputs_of: InputsOf
    classes: int
    padded_length: int

    @property
    def device(self) -> Device:
        """Where it trains."""
        return self.training_state.device

    def begin(self) -> None:
        """Forget the updates taken so far, but for the weights: the state of a run's start."""
        self.training_state.optimizer.zero_grad(set_to_none=True)
        self.training_state.optimizer.state.clear()
        set_training(self.training_state.model)

    def take_update(self, *, batch_size: int) -> None:
        """Take one update of a single micro-batch."""
        self.training_state.update(0, self._cut_one(batch_size))

    def evaluate(self, *, batch_size: int) -> None:
        """Predict one batch, as the validation between updates does."""
        self.training_state.optimizer.zero_grad(set_to_none=True)
        predict_logits(
            self.training_state.model,
            ModelInputs(self.inputs_of, np.full(batch_size, self.padded_length)),
            padded_lengths=[self.padded_length],
            batch_size=batch_size,
            device=self.device,
        )

    def _cut_one(self, batch_size: int) -> Iterator[MicroBatch]:
        examples = Examples(
            inputs_of=self.inputs_of,
            lengths=np.full(batch_size, self.padded_length),
            labels=np.arange(batch_size) % self.classes,
            weights=np.ones(batch_size, np.float32),
        )
        return cut_batch(
            examples,
            Batch(np.arange(batch_size), self.padded_length),
            batch_size=batch_size,
            pads_batches=self.device.shapes.pads_batches,
            torch_device=self.device.torch_device,
        )


@dataclass(frozen=True)
class ExtractionTrial:
    """The one pass over the frozen part of a model, as ``run`` does it.

    Args:
        training_state: The model on its device.
        prefix: What is frozen of it.
        inputs_of: Makes the model's inputs.
        padded_length: Tokens in a row.
    """

    training_state: TrainingState
    prefix: FeatureExtractor
    inputs_of: InputsOf
    padded_length: int

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self.training_state.device

    def begin(self) -> None:
        """Do nothing: a pass leaves nothing behind."""

    def take_update(self, *, batch_size: int) -> None:
        """Run one batch, in place of an update, and bring what it gives to the CPU."""
        self.run(batch_size=batch_size).cpu()

    def evaluate(self, *, batch_size: int) -> None:
        """Do nothing: what follows runs on the rest of the model."""

    def run(self, *, batch_size: int) -> torch.Tensor:
        """Return what the frozen part gives for one batch, on the device."""
        inputs = self.inputs_of(np.arange(batch_size), self.padded_length)
        with self.training_state.processes.autocast():
            return self.prefix.extract(
                {name: one.to(self.device.torch_device) for name, one in inputs.items()}
            )


def build_trial(case: Case, *, device: Device) -> Trial | ExtractionTrial:
    """Build a case's model and make it ready.

    Raises:
        ModelUnsupported: If a part is wanted of a model that can't be cut in two.
    """
    # The processor takes seconds for random weights, and is needed where a model is cut in two.
    is_made_there = case.part == "whole" and not device.memory.is_shared
    with device.torch_device if is_made_there else torch.device("cpu"):
        model = build_model(case)
    structure = find_structure(model)
    if case.part == "whole":
        return prepare_trial(case, model, structure, device=device)
    freeze_parameters(model, structure, mode=case.mode)
    prefix = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    if prefix is None:
        raise ModelUnsupported(
            f"the frozen part of {type(model).__name__} can't be cut off",
            remedy="use --no-feature-cache",
        )
    # The parts share their parameters, but each has buffers of its own.
    place(model, device.torch_device)
    training_state = _prepare(case, prefix.trainable, structure, device=device)
    inputs_of = _random_tokens(model, takes_4d_mask=structure.takes_4d_mask)
    pass_over_prefix = ExtractionTrial(training_state, prefix, inputs_of, case.padded_length)
    if case.part == "prefix":
        return pass_over_prefix
    states = pass_over_prefix.run(batch_size=1).cpu()
    inputs_of = _repeated_states(states, takes_4d_mask=structure.takes_4d_mask)
    return Trial(training_state, inputs_of, case.classes, case.padded_length)


def build_model(case: Case) -> PreTrainedModel:
    """Return a classifier of the case's architecture with random weights in fp32.

    It is on PyTorch's default device.
    """
    architecture = dict(case.architecture)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    config.num_labels = case.classes
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    return model


def prepare_trial(
    case: Case, model: PreTrainedModel, structure: Structure, *, device: Device
) -> Trial:
    """Make a whole model ready for the case's updates.

    Args:
        case: What is tried.
        model: Of the case's architecture; frozen and moved in place.
        structure: Of the model.
        device: Where it trains.
    """
    freeze_parameters(model, structure, mode=case.mode)
    return Trial(
        _prepare(case, model, structure, device=device),
        _random_tokens(model, takes_4d_mask=structure.takes_4d_mask),
        case.classes,
        case.padded_length,
    )


def _prepare(
    case: Case, model: nn.Module, structure: Structure, *, device: Device
) -> TrainingState:
    # The figures change the weights alone, and neither memory nor time.
    return prepare_training(
        model,
        head=structure.head,
        device=device,
        precision=case.precision,
        schedule=Schedule(peak=1e-5, warmup_updates=0, total_updates=1),
        head_lr_multiplier=1.0,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )


def _random_tokens(model: PreTrainedModel, *, takes_4d_mask: bool) -> InputsOf:
    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
        tokens = torch.randint(model.config.vocab_size, (len(rows), padded_length))
        return prepare_mask(
            {"input_ids": tokens, "attention_mask": _mask_one(len(rows), padded_length)},
            takes_4d_mask=takes_4d_mask,
        )

    return inputs_of


def _repeated_states(states: torch.Tensor, *, takes_4d_mask: bool) -> InputsOf:
    """Make the inputs of a suffix from one row's states: [1, width, hidden] or [1, hidden]."""

    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
        repeated = states.repeat(len(rows), *[1] * (states.ndim - 1))
        if states.ndim == 2:
            return pooled_inputs(repeated, takes_4d_mask=takes_4d_mask)
        return prepare_mask(
            {"inputs_embeds": repeated, "attention_mask": _mask_one(len(rows), padded_length)},
            takes_4d_mask=takes_4d_mask,
        )

    return inputs_of


def _mask_one(rows: int, padded_length: int) -> torch.Tensor:
    """Return a mask with one token masked: where none is, attention takes a cheaper path."""
    mask = torch.ones(rows, padded_length, dtype=torch.bool)
    mask[0, -1] = False
    return mask
