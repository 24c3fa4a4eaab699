"""Records how the modules of a model are called in a forward."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput

# What a forward raises on inputs that the model was not made for.
REFUSALS = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass
class Call:
    """A module's first call in a forward.

    Args:
        features: The first of its arguments that can be features, if any can.
        ended: When the module last returned, counted in calls of modules.
    """

    module: nn.Module
    features: torch.Tensor | None
    output: Any = None
    ended: int = -1

    @property
    def first_output(self) -> Any:
        """The output or, of several, the first."""
        is_several = isinstance(self.output, tuple | ModelOutput) and len(self.output) > 0
        return self.output[0] if is_several else self.output


def record_calls(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Call]:
    """Run a model without a graph; return its modules' calls by name, as they began."""
    names = {module: name for name, module in model.named_modules()}
    calls: dict[str, Call] = {}
    returns = count()

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(names[module], Call(module, find_features(args, kwargs)))

    def end(module: nn.Module, _: Any, output: Any) -> None:
        call = calls[names[module]]
        if call.ended < 0:
            call.output = output
        call.ended = next(returns)

    with ExitStack() as hooks, torch.no_grad():
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
        model(**inputs)
    return calls


def find_features(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first of some arguments that can be features."""
    return next((value for value in (*args, *kwargs.values()) if are_features(value)), None)


def are_features(value: Any) -> bool:
    """Whether a value is a float tensor [examples, hidden] or [examples, tokens, hidden]."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.ndim in (2, 3)
