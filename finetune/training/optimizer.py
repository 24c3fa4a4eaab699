"""AdamW or Adafactor over the parameters that train."""

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from finetune.devices.base import Device

# Tensors of a parameter's size that a step of transformers' Adafactor holds at once.
ADAFACTOR_TEMPORARIES = 2


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    head: Set[str],
    head_lr_multiplier: float,
    weight_decay: float,
    device: Device,
) -> torch.optim.Optimizer:
    """Return an optimizer over what requires a gradient, with decay on matrices only.

    Biases and norms are vectors and keep their size. The learning rate is set before each step.

    Args:
        model: Where the parameters are.
        name: ``adamw``, or ``adafactor``, which keeps a number for each row and column of a matrix
            where AdamW keeps two for each of its elements.
        head: Names of the head's parameters. It starts from nothing, the core does not.
        head_lr_multiplier: The head's learning rate over the core's.
        weight_decay: Decoupled decay of the matrices.
        device: Where they are. Where steps are captured, AdamW's learning rate is a tensor
            there, which a captured step reads anew.
    """
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {
            "params": [
                parameter
                for name, parameter in trained
                if (name in head) == is_head and (parameter.ndim >= 2) == is_matrix
            ],
            "weight_decay": weight_decay if is_matrix else 0.0,
            "lr_multiplier": head_lr_multiplier if is_head else 1.0,
        }
        for is_head in (False, True)
        for is_matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adafactor":
        return Adafactor(groups, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]
    if device.captures:
        for group in groups:
            group["lr"] = torch.zeros((), device=device.torch_device)
        return torch.optim.AdamW(groups, fused=True, capturable=True)
    return OneStepAdamW(groups, fused=True)


class OneStepAdamW(torch.optim.AdamW):
    """Fused AdamW with one count of steps for each group, which ``make_state`` has made.

    PyTorch's counts the steps of each parameter, which on MPS is an operation each, and takes
    twice as long for the few parameters of a head.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change the parameters that have gradients."""
        make_state(self)
        for group in self.param_groups:
            pairs = [(one, one.grad) for one in group["params"] if one.grad is not None]
            if pairs:
                self._step_group(group, *zip(*pairs, strict=True))

    def _step_group(
        self,
        group: dict[str, Any],
        trained: tuple[torch.Tensor, ...],
        gradients: tuple[torch.Tensor, ...],
    ) -> None:
        states = [self.state[one] for one in trained]
        step = states[0]["step"]
        step += 1
        # Read from a checkpoint, each has its own.
        for state in states:
            state["step"] = step
        beta1, beta2 = group["betas"]
        # GradScaler's, for the time of its step.
        found_inf = getattr(self, "found_inf", None)
        torch._fused_adamw_(
            trained,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [step] * len(trained),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        if found_inf is not None:
            step -= found_inf


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that it would make in its first step.

    A parameter has all of its state or none, wherever memory runs out.

    Args:
        optimizer: As ``build_optimizer`` returns it. State that is there stays as it is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                make = _adamw_state if is_adamw(group) else _adafactor_state
                optimizer.state[parameter] = make(parameter)


def make_room_for_step(optimizer: torch.optim.Optimizer) -> None:
    """Allocate and free what a step takes beside gradients and state, so that it will be there.

    Adafactor takes two tensors of the size of one parameter at a time; fused AdamW takes nothing.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        if not is_adamw(group)
        for parameter in group["params"]
    ]
    if parameters:
        largest = max(parameters, key=torch.Tensor.numel)
        _ = [torch.empty_like(largest) for _ in range(ADAFACTOR_TEMPORARIES)]


def is_adamw(group: dict[str, Any]) -> bool:
    """Return whether a group of parameters is one of AdamW."""
    return "betas" in group


def _adamw_state(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _adafactor_state(parameter: nn.Parameter) -> dict[str, Any]:
    counts = {"step": 0, "RMS": 0}
    if parameter.ndim < 2:
        return counts | {"exp_avg_sq": torch.zeros_like(parameter)}
    *stacked, rows, columns = parameter.shape
    return counts | {
        "exp_avg_sq_row": parameter.new_zeros((*stacked, rows)),
        "exp_avg_sq_col": parameter.new_zeros((*stacked, columns)),
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters a learning rate, in place: the core's, and the head's by its factor."""
    for group in optimizer.param_groups:
        group_rate = rate * group["lr_multiplier"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group_rate)
        else:
            group["lr"] = group_rate
