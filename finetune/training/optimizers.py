"""AdamW, its state, and the learning rate of each step."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finetune.devices.base import Device


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to a peak and linear decay to zero, as a function of the step.

    >>> schedule = Schedule(peak=1.0, warmup_steps=2, total_steps=4)
    >>> [schedule.learning_rate_at(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; never zero, so none is wasted."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decaying = self.total_steps - self.warmup_steps
        return self.peak * (self.total_steps - step) / max(1, decaying)


@dataclass(frozen=True)
class Hyperparameters:
    """How gradients become steps."""

    schedule: Schedule
    head_lr_multiplier: float
    weight_decay: float
    max_grad_norm: float


def build_optimizer(
    model: nn.Module, hyperparameters: Hyperparameters, *, head: Set[str], device: Device
) -> torch.optim.Optimizer:
    """Return AdamW over the parameters that require gradients.

    Biases and norms do not decay. The head, of these names, has a learning rate of its own.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (is_head, is_matrix): [] for is_head in (False, True) for is_matrix in (True, False)
    }
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[parameter_name in head, parameter.ndim >= 2].append(parameter)
    groups_of_adamw: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": hyperparameters.weight_decay if is_matrix else 0.0,
            "lr_multiplier": hyperparameters.head_lr_multiplier if is_head else 1.0,
        }
        for (is_head, is_matrix), parameters in groups.items()
        if parameters
    ]
    if device.captures:
        for group in groups_of_adamw:
            # A captured step reads the learning rate again each time.
            group["lr"] = torch.zeros((), device=device.torch_device)
    return torch.optim.AdamW(groups_of_adamw, fused=True, capturable=device.captures)


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that its first step would make, where it is missing.

    A parameter has all of its state or none, wherever memory runs out.
    """
    for parameter in trained_by(optimizer):
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the encoder's learning rate, and the head's by its multiplier."""
    for group in optimizer.param_groups:
        group_rate = rate * group["lr_multiplier"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group_rate)
        else:
            group["lr"] = group_rate
