"""A model with random weights that takes the steps of training at any batch size, measured."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from finetune.batch_finder.case import Case
from finetune.devices.base import Device, place
from finetune.errors import ModelUnsupported
from finetune.evaluation.predict import predict_logits
from finetune.events import Trial
from finetune.model.feature_extractor import FeatureExtractor, split_frozen
from finetune.model.freeze import freeze_parameters, set_training
from finetune.model.gradient_checkpointing import enable_gradient_checkpointing
from finetune.model.mean_pooling import compute_mean_alone
from finetune.model.structure import Structure, find_structure
from finetune.tasks.choose import task_of_shape
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples, Inputs, InputsOf, ModelInputs, prepare_mask
from finetune.training.micro_batches import cut_batch
from finetune.training.optimizers import Hyperparameters, Schedule
from finetune.training.step import TrainingState, prepare_training

# Shorter times say more about the machine's other work, and about a GPU that was idle before, than
# about the batch size.
_MIN_TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class TrialModel:
    """Training as ``run`` does it, on random examples of the greatest padded length.

    With an ``extractor``, a step is the extraction of features, whose frozen layers read what
    ``tokens_of`` makes; ``training_state`` has the trainable layers.
    """

    case: Case
    training_state: TrainingState
    inputs_of: InputsOf
    tokens_of: InputsOf
    extractor: FeatureExtractor | None = None

    @property
    def device(self) -> Device:
        """Where it trains."""
        return self.training_state.device

    def begin(self) -> None:
        """Return to the state of a run's start, but for the weights."""
        self.training_state.reset()
        set_training(self.training_state.model)

    def take_step(self, *, batch_size: int) -> None:
        """Take one step of a single micro-batch, or extract the features of one batch."""
        if self.extractor is None:
            self._train(batch_size)
        else:
            inputs = self.tokens_of(np.arange(batch_size), self.case.padded_length)
            _extract(self.extractor, inputs, self.training_state)

    def evaluate(self, *, batch_size: int) -> None:
        """Predict one batch, as the validation between steps does."""
        if self.extractor is not None:
            self._train(1)  # which makes the optimizer's state
        self.training_state.optimizer.zero_grad(set_to_none=True)
        with self.device.autocast(self.case.precision):
            predict_logits(
                self.training_state.model,
                ModelInputs(self.inputs_of, np.full(batch_size, self.case.padded_length)),
                padded_lengths=[self.case.padded_length],
                batch_size=batch_size,
                device=self.device,
            )

    def _train(self, batch_size: int) -> None:
        task = task_of_shape(self.case.task, outputs=self.case.classes)
        examples = Examples(
            inputs_of=self.inputs_of,
            lengths=np.full(batch_size, self.case.padded_length),
            labels=task.sample_labels(batch_size),
            weights=np.ones(batch_size, np.float32),
        )
        batch = Batch(np.arange(batch_size), self.case.padded_length)
        self.training_state.take_step(
            0, cut_batch(examples, batch, batch_size=batch_size, device=self.device)
        )


def build_trial_model(case: Case, *, device: Device) -> TrialModel:
    """Build a case's model and make it ready for its steps."""
    device.choose_attention(longest_tokens=case.padded_length)
    # Random weights take the CPU seconds, but splitting a model needs them there.
    is_made_there = case.part == "whole" and not device.memory.is_shared
    architecture = dict(case.architecture)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    config.num_labels = case.classes
    make = cast(Callable[..., PreTrainedModel], AutoModelForSequenceClassification.from_config)
    with device.torch_device if is_made_there else torch.device("cpu"):
        model = make(config, dtype=torch.float32)
    # Any weights of a layer that never trains take the same memory and time.
    structure = find_structure(model, has_mean_layer=case.has_mean_layer)
    if case.has_mean_layer:
        compute_mean_alone(model)
    if case.gradient_checkpointing:
        enable_gradient_checkpointing(model, device)
    if case.part == "whole":
        return prepare_trial_model(case, model, structure, device=device)
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
    tokens_of = _random_tokens(model, takes_4d_mask=structure.takes_4d_mask)
    features = _extract(extractor, tokens_of(np.arange(1), case.padded_length), training_state)
    # Of one example, repeated: [1, tokens, hidden], or one vector for its pooled text.
    features = features if features.ndim == 3 else features[:, None]
    features_of = _inputs_of(
        "inputs_embeds",
        lambda rows, _: features.repeat(rows, 1, 1),
        takes_4d_mask=structure.takes_4d_mask,
    )
    return TrialModel(
        case, training_state, features_of, tokens_of, extractor if case.part == "features" else None
    )


def prepare_trial_model(
    case: Case, model: PreTrainedModel, structure: Structure, *, device: Device
) -> TrialModel:
    """Make a whole model of the case's architecture ready for its steps, in place."""
    freeze_parameters(model, structure, mode=case.mode)
    training_state = _prepare(case, model, structure, device=device)
    tokens_of = _random_tokens(model, takes_4d_mask=structure.takes_4d_mask)
    return TrialModel(case, training_state, tokens_of, tokens_of)


def _prepare(
    case: Case, model: nn.Module, structure: Structure, *, device: Device
) -> TrainingState:
    # These numbers change the weights alone, and neither memory nor time.
    schedule = Schedule(peak=1e-5, warmup_steps=0, total_steps=1)
    hyperparameters = Hyperparameters(
        case.optimizer, schedule, head_lr_multiplier=1.0, weight_decay=0.01, max_grad_norm=1.0
    )
    losses = task_of_shape(case.task, outputs=case.classes).losses
    return prepare_training(
        model, head=structure.head, device=device, precision=case.precision,
        losses=losses, hyperparameters=hyperparameters,
    )  # fmt: skip


def _extract(
    extractor: FeatureExtractor, inputs: Inputs, training_state: TrainingState
) -> torch.Tensor:
    """Return the features of one batch, on the CPU."""
    torch_device = training_state.device.torch_device
    with training_state.device.autocast(training_state.precision):
        on_device = {name: tensor.to(torch_device) for name, tensor in inputs.items()}
        return extractor.extract(on_device).cpu()


def _inputs_of(
    name: str, make: Callable[[int, int], torch.Tensor], *, takes_4d_mask: bool
) -> InputsOf:
    """Return what makes inputs from tensors of so many examples and tokens."""

    def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
        tensor = make(len(rows), padded_length)
        mask = torch.ones(tensor.shape[:2], dtype=torch.bool)
        # Where no token is masked, attention takes a cheaper path.
        mask[0, -1] = tensor.shape[1] == 1
        return prepare_mask({name: tensor, "attention_mask": mask}, takes_4d_mask=takes_4d_mask)

    return inputs_of


def _random_tokens(model: PreTrainedModel, *, takes_4d_mask: bool) -> InputsOf:
    vocabulary = model.config.vocab_size
    return _inputs_of(
        "input_ids", lambda *size: torch.randint(vocabulary, size), takes_4d_mask=takes_4d_mask
    )


def measure(model: TrialModel, *, batch_size: int, budget_bytes: int) -> Trial:
    """Take at least two steps, three on a GPU, and evaluate one batch, of one size.

    Each call starts from no more than the weights, as a run does. Allocations beyond the budget
    fail, with whatever PyTorch raises then. The peak is None where the process can't measure it.
    """
    device, memory = model.device, model.device.memory
    model.begin()
    memory.release()
    memory.set_memory_limit(budget_bytes)
    memory.reset_peak()
    step = partial(model.take_step, batch_size=batch_size)
    # The first step also pays for new memory, the optimizer's state and kernels.
    step()
    # The best of some series of steps, each twice as long.
    steps = 1 if device.is_reference else 2
    best_rate = timed_seconds = 0.0
    while timed_seconds < _MIN_TIMED_SECONDS:
        seconds = device.time_calls(step, calls=steps)
        best_rate = max(best_rate, steps * batch_size / seconds)
        timed_seconds += seconds
        steps *= 2
    model.evaluate(batch_size=batch_size)
    return Trial(batch_size, "fits", memory.held_peak_bytes(), best_rate)
