"""AdamW over the parameters that train."""

import torch
from torch import nn


def build_optimizer(
    model: nn.Module, *, weight_decay: float, is_fused: bool
) -> torch.optim.Optimizer:
    """Return AdamW over what requires a gradient, with decay on matrices only.

    Biases and norms are vectors and keep their size. The learning rate is set before each update.

    Args:
        model: Where the parameters are.
        weight_decay: Decoupled decay of the matrices.
        is_fused: Whether the device has a kernel for the whole update: on MPS 8 to 10 times as fast
            as one operation after another (pytorch#127242).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=is_fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters one learning rate, in place."""
    for group in optimizer.param_groups:
        group["lr"] = rate
