"""Model, optimizer and schedule: all that a step needs."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from finetune.devices.base import CapturedFunction, Device, Tensors
from finetune.distributed.processes import ALONE, Processes
from finetune.model.gradient_checkpointing import has_gradient_checkpointing
from finetune.training.accelerator import Accelerator
from finetune.training.gradients import (
    Losses,
    accumulate_gradients,
    add_up_gradients,
    copy_gradients,
)
from finetune.training.micro_batches import MicroBatch, StepPart
from finetune.training.optimizer import build_optimizer, set_learning_rate
from finetune.training.schedule import Schedule


@dataclass(frozen=True)
class Hyperparameters:
    """How gradients become steps.

    Args:
        optimizer: ``adamw`` or ``adafactor``.
        schedule: The learning rate of each step.
        head_lr_multiplier: The head's learning rate over the encoder's.
        weight_decay: Decoupled decay of the matrices.
        max_grad_norm: Largest norm of the gradients.
    """

    optimizer: str
    schedule: Schedule
    head_lr_multiplier: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True)
class TrainingState:
    """A model with its optimizer, ready for steps.

    Args:
        model: On its device, its forward in the precision of the run.
        optimizer: Over its trained parameters.
        device: Where it is.
        accelerator: Accelerate's part of a step.
        losses: Gives the loss of each example.
        hyperparameters: How gradients become steps.
        processes: Those that train the model, each on its share of an effective batch.
        captured: A step but for its learning rate, captured, where the device can do that.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: Device
    accelerator: Accelerator
    losses: Losses
    hyperparameters: Hyperparameters
    processes: Processes = ALONE
    captured: CapturedFunction | None = None

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return self.hyperparameters.schedule

    def update(self, number: int, micro_batches: Iterable[StepPart]) -> torch.Tensor:
        """Take step ``number``, counted from 0, and return its loss, a scalar on the device."""
        return self.prepare_step(micro_batches)(number)

    def prepare_step(self, micro_batches: Iterable[StepPart]) -> Callable[[int], torch.Tensor]:
        """Do all of a step that needs memory, and change nothing but gradients.

        Nothing here waits for other processes.

        Returns:
            What takes the step of a number, and returns its loss.
        """
        if self.captured:
            self._drop_gradients()
            micro_batches = list(micro_batches)
            whole = [one.tensors() for one in micro_batches if isinstance(one, MicroBatch)]
            if len(whole) == len(micro_batches) and (replay := self.captured.prepare(whole)):
                return partial(self._replay, replay)
        loss = self._go_backward(micro_batches)
        if self.processes.count == 1:
            self._clip_gradients()
            return partial(self._step, loss)
        return partial(self._step_together, loss, self._copy_gradients())

    def _drop_gradients(self) -> None:
        """Free the gradients that a step leaves which is not captured, for what is captured."""
        if any(one.grad is not None for one in self.optimizer.param_groups[0]["params"]):
            self.optimizer.zero_grad(set_to_none=True)

    def _replay(self, replay: Callable[[], torch.Tensor], number: int) -> torch.Tensor:
        set_learning_rate(self.optimizer, self.schedule.learning_rate_at(number))
        return replay()

    def _step(self, loss: torch.Tensor, number: int) -> torch.Tensor:
        self.step(number)
        return loss

    def _step_together(self, loss: torch.Tensor, flat: torch.Tensor, number: int) -> torch.Tensor:
        self._add_up(loss, flat)
        self._clip_gradients()
        return self._step(loss, number)

    def _copy_gradients(self) -> torch.Tensor:
        # In bf16 autocast, products give gradients of 16 bits: half as much goes between devices.
        is_half = self.accelerator.precision == "bf16"
        return copy_gradients(self.optimizer, dtype=torch.bfloat16 if is_half else torch.float32)

    def _add_up(self, loss: torch.Tensor, flat: torch.Tensor) -> None:
        self.processes.all_reduce_sum(loss)
        add_up_gradients(self.optimizer, flat, self.processes)

    @property
    def cuda_graph_error(self) -> str | None:
        """Why steps are launched operation by operation on a device that captures them."""
        if self.captured:
            return self.captured.failure
        return _why_not_capturable(self) if self.device.captures else None

    def accumulate_gradients(self, micro_batches: Iterable[StepPart]) -> torch.Tensor:
        """Do what comes before the optimizer's step; return the loss, a scalar on the device."""
        loss = self._go_backward(micro_batches)
        if self.processes.count > 1:
            self._add_up(loss, self._copy_gradients())
        self._clip_gradients()
        return loss

    def _go_backward(self, micro_batches: Iterable[StepPart]) -> torch.Tensor:
        return accumulate_gradients(
            self.model,
            self.optimizer,
            micro_batches,
            losses=self.losses,
            accelerator=self.accelerator,
        )

    def _clip_gradients(self) -> None:
        max_norm = self.hyperparameters.max_grad_norm
        self.accelerator.clip_gradients(self.optimizer, max_norm=max_norm)

    def discard_gradients(self) -> None:
        """Drop the gradients of a step that takes no step, complete or not."""
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.skip_step()
        if self.captured:
            self.captured.clear()

    def forget(self) -> None:
        """Return to the state before the first step, but for the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        if self.captured:
            self.captured.clear()

    def step(self, number: int) -> None:
        """Change the trained parameters by the gradients, as step ``number``, from 0."""
        set_learning_rate(self.optimizer, self.schedule.learning_rate_at(number))
        self.accelerator.step(self.optimizer)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def prepare_training(
    model: nn.Module,
    *,
    head: Set[str],
    device: Device,
    precision: str,
    losses: Losses,
    hyperparameters: Hyperparameters,
    processes: Processes = ALONE,
) -> TrainingState:
    """Place a model on a device and give it an optimizer.

    Args:
        model: Moved in place; its frozen parameters require no gradients.
        head: Names of the head's parameters.
        device: Where to train.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the arithmetic; the weights stay fp32.
        losses: Gives the loss of each example.
        hyperparameters: How gradients become steps.
        processes: Those that train the model.
    """
    accelerator = Accelerator(device, precision=precision)
    optimizer = build_optimizer(
        model,
        name=hyperparameters.optimizer,
        head=head,
        head_lr_multiplier=hyperparameters.head_lr_multiplier,
        weight_decay=hyperparameters.weight_decay,
        device=device,
    )
    placed = accelerator.prepare(model)
    state = TrainingState(
        placed, optimizer, device, accelerator, losses, hyperparameters, processes
    )
    if _why_not_capturable(state):
        return state
    return replace(state, captured=device.capture(partial(_take_step, state)))


def _why_not_capturable(state: TrainingState) -> str | None:
    if state.accelerator.scales_gradients:
        return "gradients are scaled in fp16"
    if state.hyperparameters.optimizer == "adafactor":
        return "Adafactor counts its steps on the CPU"
    if has_gradient_checkpointing(state.model):
        return "gradient checkpointing repeats random numbers"
    return None


def _take_step(state: TrainingState, micro_batches: Sequence[Tensors]) -> torch.Tensor:
    """Take a step at the learning rate that is set."""
    loss = state.accumulate_gradients(MicroBatch.from_tensors(one) for one in micro_batches)
    state.accelerator.step(state.optimizer)
    # What is captured next may have the gradients' memory.
    state.optimizer.zero_grad(set_to_none=True)
    return loss
