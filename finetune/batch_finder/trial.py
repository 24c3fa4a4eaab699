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
from finetune.training.training_state import Hyperparameters, TrainingState, prepare_training


@dataclass(frozen=True)
class Trial:
    """Training as ``run`` does it, on random examples of the greatest padded length.

    Args:
        training_state: The model on its device, and its optimizer.
        inputs_of: Makes the model's inputs.
        classes: Number of classes.
        padded_length: Tokens of each example, padding included.
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
        """Return to the state of a run's start, but for the weights."""
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
            device=self.device,
        )


@dataclass(frozen=True)
class ExtractionTrial:
    """Feature extraction as ``run`` does it, and evaluation on the features at the same batch size.

    Args:
        trainable: The update on features that follows it.
        extractor: The frozen layers.
        inputs_of: Makes the whole model's inputs.
    """

    trainable: Trial
    extractor: FeatureExtractor
    inputs_of: InputsOf

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self.trainable.device

    def begin(self) -> None:
        """Return to the state of a run's start, but for the weights."""
        self.trainable.begin()

    def take_update(self, *, batch_size: int) -> None:
        """Extract the features of one batch, in place of an update."""
        inputs = self.inputs_of(np.arange(batch_size), self.trainable.padded_length)
        _extract(self.extractor, inputs, self.trainable.training_state).cpu()

    def evaluate(self, *, batch_size: int) -> None:
        """Predict one batch from features, beside the state of an optimizer that took an update."""
        self.trainable.take_update(batch_size=1)
        self.trainable.evaluate(batch_size=batch_size)


def build_trial(case: Case, *, device: Device) -> Trial | ExtractionTrial:
    """Build a case's model and make it ready.

    Raises:
        ModelUnsupported: If the model can't be split into the case's part.
    """
    # Random weights take the CPU seconds, but splitting a model needs them there.
    is_made_there = case.part == "whole" and not device.memory.is_shared
    with device.torch_device if is_made_there else torch.device("cpu"):
        model = build_model(case)
    structure = find_structure(model)
    if case.part == "whole":
        return prepare_trial(case, model, structure, device=device)
    freeze_parameters(model, structure, mode=case.mode)
    extractor = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    if extractor is None:
        raise ModelUnsupported(
            f"the frozen layers of {type(model).__name__} can't be split off",
            remedy="use --no-feature-cache",
        )
    # The parts share their parameters, but each has buffers of its own.
    place(model, device.torch_device)
    training_state = _prepare(case, extractor.trainable, structure, device=device)
    inputs_of = _random_tokens(model, takes_4d_mask=structure.takes_4d_mask)
    one_example = inputs_of(np.arange(1), case.padded_length)
    features = _extract(extractor, one_example, training_state).cpu()
    trainable = Trial(
        training_state,
        _repeated_features(features, takes_4d_mask=structure.takes_4d_mask),
        case.classes,
        case.padded_length,
    )
    if case.part == "trainable":
        return trainable
    return ExtractionTrial(trainable, extractor, inputs_of)


def build_model(case: Case) -> PreTrainedModel:
    """Return a classifier with random weights in fp32, on PyTorch's default device."""
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
    """Make a whole model of the case's architecture ready for its updates, in place."""
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
    # These numbers change the weights alone, and neither memory nor time.
    return prepare_training(
        model,
        head=structure.head,
        device=device,
        precision=case.precision,
        hyperparameters=Hyperparameters(
            schedule=Schedule(peak=1e-5, warmup_updates=0, total_updates=1),
            head_lr_multiplier=1.0,
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
    )


def _random_tokens(model: PreTrainedModel, *, takes_4d_mask: bool) -> InputsOf:
    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
        tokens = torch.randint(model.config.vocab_size, (len(rows), padded_length))
        return prepare_mask(
            {"input_ids": tokens, "attention_mask": _mask_one(len(rows), padded_length)},
            takes_4d_mask=takes_4d_mask,
        )

    return inputs_of


def _extract(
    extractor: FeatureExtractor, inputs: Inputs, training_state: TrainingState
) -> torch.Tensor:
    """Return the features of one batch, on the device."""
    torch_device = training_state.device.torch_device
    with training_state.accelerator.autocast():
        return extractor.extract({name: one.to(torch_device) for name, one in inputs.items()})


def _repeated_features(features: torch.Tensor, *, takes_4d_mask: bool) -> InputsOf:
    """Make inputs from one example's features, [1, padded length, hidden] or [1, hidden]."""

    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
        repeated = features.repeat(len(rows), *[1] * (features.ndim - 1))
        if features.ndim == 2:
            return pooled_inputs(repeated, takes_4d_mask=takes_4d_mask)
        return prepare_mask(
            {"inputs_embeds": repeated, "attention_mask": _mask_one(len(rows), padded_length)},
            takes_4d_mask=takes_4d_mask,
        )

    return inputs_of


def _mask_one(examples: int, padded_length: int) -> torch.Tensor:
    """Return a mask with one token masked: where none is, attention takes a cheaper path."""
    mask = torch.ones(examples, padded_length, dtype=torch.bool)
    mask[0, -1] = False
    return mask
