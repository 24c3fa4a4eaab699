"""AdamW over the parameters that train."""

from collections.abc import Set

import torch
from torch import nn


def build_optimizer(
    model: nn.Module,
    *,
    head: Set[str],
    head_lr_multiplier: float,
    weight_decay: float,
    is_fused: bool,
) -> torch.optim.Optimizer:
    """Return AdamW over what requires a gradient, with decay on matrices only.

    Biases and norms are vectors and keep their size. The learning rate is set before each update.

    Args:
        model: Where the parameters are.
        head: Names of the head's parameters. It starts from nothing, the core does not.
        head_lr_multiplier: The head's learning rate over the core's.
        weight_decay: Decoupled decay of the matrices.
        is_fused: Whether the device has a kernel for the whole update: on MPS 8 to 10 times as fast
            as one operation after another (pytorch#127242).
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
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=is_fused)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that it would make in its first step, so that no step needs memory.

    A parameter has all of its state or none, wherever memory runs out.

    Args:
        optimizer: As ``build_optimizer`` returns it. State that is there stays as it is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters a learning rate, in place: the core's, and the head's by its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
