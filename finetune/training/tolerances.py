"""How far results of a device may be from the CPU's in fp32, and how far they are."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

# Of the root mean square of all numbers of a model.
_MIN_SHARE = 0.01


class Tolerance(NamedTuple):
    """The largest relative errors that pass, in one precision.

    Those of changes by steps are the largest: AdamW's steps are not in proportion to the
    gradients, and a small step may be lost in the rounding of a weight.
    """

    logits: float
    gradients: float
    steps: float

    def of(self, part: str) -> float:
        """Return the tolerance of a part of what is compared; a loss has that of logits."""
        if part in ("evaluation", "logits", "loss"):
            return self.logits
        return self.gradients if part == "gradients" else self.steps


# In fp32 far above rounding, and below what TF32 does: logits were off by 1e-3 with it on an H200,
# and by 3e-6 without. A rounding errs by up to 2⁻⁸ of a number in bf16 and 2⁻¹¹ in fp16. BERT-base
# was off there by 3 to 4 of these in logits, 5 to 6 in gradients and 12 to 14 in changes; what
# passes is 10, 25 and 50.
TOLERANCES = {
    "fp32": Tolerance(logits=1e-4, gradients=1e-3, steps=1e-2),
    "bf16": Tolerance(logits=4e-2, gradients=1e-1, steps=2e-1),
    "fp16": Tolerance(logits=5e-3, gradients=1.25e-2, steps=2.5e-2),
}


def parameter_errors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the relative error of each parameter's gradient or change, by name.

    What is small for its module, or for the model, is compared with the size of others there.
    """
    sizes = _least_sizes(expected)
    return {
        name: relative_error(actual[name], one, least_size=sizes[module_of(name)])
        for name, one in expected.items()
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor, *, least_size: float) -> float:
    """Return the norm of the difference of two tensors over the norm of what is expected.

    Some gradients are zero but for rounding, as is that of the bias of attention's keys. So the
    expected numbers are taken to have a root mean square of at least ``least_size``.
    """
    distance = (actual - expected).norm().item()
    size = max(expected.norm().item(), least_size * math.sqrt(expected.numel()))
    return ratio(distance, size)


def worst_example_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the worst example's difference over the mean norm of the examples.

    One wrong example among many counts as if alone. Shapes: [examples, numbers] or [numbers].
    """
    distance = (actual - expected).norm(dim=-1).max().item()
    return ratio(distance, mean_norm(expected))


def mean_norm(examples: torch.Tensor) -> float:
    """Return the root mean square of the norms of examples, of shape [examples, numbers]."""
    return float(examples.norm(dim=-1).square().mean().sqrt())


def ratio(distance: float, size: float) -> float:
    """Return a relative error, which is infinite for NaN and where nothing was expected."""
    if distance == 0:
        return 0.0
    # NaN is never right.
    return distance / size if size > 0 and not math.isnan(distance) else math.inf


def module_of(parameter: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def _least_sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the root mean square of each module's numbers, at least a hundredth of that of all."""
    by_module: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for name, one in tensors.items():
        by_module[module_of(name)].append(one)
    least = _root_mean_square(tensors.values()) * _MIN_SHARE
    return {module: max(least, _root_mean_square(some)) for module, some in by_module.items()}


def _root_mean_square(tensors: Iterable[torch.Tensor]) -> float:
    pairs = [(one.norm().item() ** 2, one.numel()) for one in tensors]
    return math.sqrt(sum(square for square, _ in pairs) / sum(numbers for _, numbers in pairs))
