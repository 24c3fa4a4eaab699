"""Whether AdamW's step has changed the parameters as its state says.

Such a step once did nothing on MPS to tensors of some layouts (pytorch#118115).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from finetune.training.comparison import Difference
from finetune.training.optimizer import is_adamw
from finetune.training.tolerances import TOLERANCES, module_of, ratio
from finetune.training.training_state import TrainingState

_ROWS = 8
# How far a number of fp32 is from the next, over its size.
_SPACING = 2.0**-23


@dataclass(frozen=True)
class StepSample:
    """Some rows of each parameter and of its state, on the CPU, in the optimizer's order.

    Args:
        parameters: float64 of shape [numbers], a tensor for each parameter.
        first_moments: The same of AdamW's means of the gradients.
        second_moments: The same of those of their squares.
        steps: Steps that each parameter has taken.
    """

    parameters: tuple[torch.Tensor, ...]
    first_moments: tuple[torch.Tensor, ...]
    second_moments: tuple[torch.Tensor, ...]
    steps: tuple[float, ...]


def sample_step(optimizer: torch.optim.Optimizer) -> StepSample | None:
    """Return a sample of AdamW between two steps; None before its first, or of another optimizer.

    Waits for the device, for four copies.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    states = [optimizer.state.get(one, {}) for one in parameters]
    if not (all(map(is_adamw, optimizer.param_groups)) and all(states)):
        return None
    return StepSample(
        parameters=_copy_rows([one.detach() for one in parameters]),
        first_moments=_copy_rows([state["exp_avg"] for state in states]),
        second_moments=_copy_rows([state["exp_avg_sq"] for state in states]),
        steps=tuple(torch.stack([state["step"] for state in states]).tolist()),
    )


def _copy_rows(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    rows = [_rows(one).flatten() for one in tensors]
    return torch.split(torch.cat(rows).cpu().double(), [one.numel() for one in rows])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    return tensor[:: math.ceil(len(tensor) / _ROWS)]


def find_wrong_step(training_state: TrainingState, before: StepSample) -> Difference | None:
    """Return which parameter the one step since a sample has changed otherwise than its state says.

    Where the optimizer has no sample, there is nothing to compare.
    """
    after = sample_step(training_state.optimizer)
    if after is None:
        return None
    names = {id(one): name for name, one in training_state.trained_parameters().items()}
    errors: dict[str, float] = {}
    for group in training_state.optimizer.param_groups:
        for one in group["params"]:
            errors[names[id(one)]] = _step_error(group, before, after, number=len(errors))
    worst = max(errors, key=errors.__getitem__)
    tolerance = TOLERANCES["fp32"].steps
    if errors[worst] <= tolerance:
        return None
    return Difference("the changes of parameters", module_of(worst), errors[worst], tolerance)


def _step_error(group: dict[str, Any], before: StepSample, after: StepSample, number: int) -> float:
    was, now = before.parameters[number], after.parameters[number]
    # fp16's gradient scaling may have left the step out.
    has_stepped = after.steps[number] > before.steps[number]
    change = _change(group, was, after, number) if has_stepped else torch.zeros_like(was)
    distance = (now - was - change).norm().item()
    # Both the old number and the new one are rounded.
    rounding = 2 * _SPACING * was.norm().item()
    return ratio(0.0 if distance <= rounding else distance, change.norm().item())


def _change(
    group: dict[str, Any], was: torch.Tensor, after: StepSample, number: int
) -> torch.Tensor:
    """Return how AdamW changes a parameter, given its state after the step."""
    rate, (beta1, beta2), steps = float(group["lr"]), group["betas"], after.steps[number]
    mean = after.first_moments[number] / (1 - beta1**steps)
    deviation = (after.second_moments[number] / (1 - beta2**steps)).sqrt()
    change: torch.Tensor = group["weight_decay"] * was + mean / (deviation + group["eps"])
    return -rate * change
