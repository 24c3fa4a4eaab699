"""What a model computes on a device and, with the same weights, on the CPU."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from finetune.devices.cpu import CpuDevice
from finetune.devices.precision import autocast, without_tf32
from finetune.model.calls import Call, record_calls
from finetune.training.gradients import Losses, weighted_loss
from finetune.training.micro_batches import MicroBatch
from finetune.training.tolerances import (
    TOLERANCES,
    mean_norm,
    module_of,
    parameter_errors,
    ratio,
    worst_example_error,
)

# By how many times what 16 bits cost on the CPU may be exceeded where a tolerance is.
_ROUNDING_MARGIN = 3.0

_WHAT = {
    "evaluation": "the logits of an evaluation",
    "logits": "the logits",
    "loss": "the losses",
    "gradients": "the gradients",
}


class Part(NamedTuple):
    """``evaluation``, ``logits``, ``loss`` or ``gradients``; which batch, or whose gradient."""

    kind: str
    name: str


@dataclass(frozen=True)
class Difference:
    """What a device computes otherwise than the CPU.

    Args:
        what: What was compared, such as ``the logits``.
        module: The first that differs, empty if none was found.
        error: Relative error; infinite where the device computed NaN.
        tolerance: The largest that passes.
    """

    what: str
    module: str
    error: float
    tolerance: float

    def __str__(self) -> str:
        place = f", first in {self.module}" if self.module else ""
        size = f"off by {self.error:.2%}" if math.isfinite(self.error) else "not numbers"
        return f"{self.what} are {size}{place}; {self.tolerance:.2%} passes"


@dataclass(frozen=True)
class Comparison:
    """A model in evaluation mode and its copy on the CPU, each with the same micro-batches.

    Args:
        model: On the device, its forward in a precision.
        cpu_model: With the same weights, its forward in fp32.
        there: Micro-batches on the device, one or more.
        here: The same on the CPU.
        losses: Gives the loss of each example.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        loss_scale: What losses are multiplied by in that precision.
    """

    model: nn.Module
    cpu_model: nn.Module
    there: Sequence[MicroBatch]
    here: Sequence[MicroBatch]
    losses: Losses
    precision: str
    loss_scale: float

    def find_difference(self) -> Difference | None:
        """Compute on both; return the first part that differs by more than rounding."""
        with without_tf32():
            actual = _compute(self.model, self.there, self.losses, loss_scale=self.loss_scale)
            expected = _compute(self.cpu_model, self.here, self.losses)
            failures = self._failures(_errors(actual, expected), expected)
            if not failures:
                return None
            (kind, _), error = next(iter(failures.items()))
            tolerance = TOLERANCES[self.precision].of(kind)
            return Difference(_WHAT[kind], self._first_module(failures), error, tolerance)

    def _failures(self, errors: Mapping[Part, float], expected: "_Results") -> dict[Part, float]:
        """Return the errors that are too large, also for what is hard to compute in 16 bits."""
        tolerance = TOLERANCES[self.precision]
        failures = {part: one for part, one in errors.items() if not one <= tolerance.of(part.kind)}
        if failures and self.precision != "fp32":
            context = partial(autocast, CpuDevice(), precision=self.precision)
            rounded = _compute(
                self.cpu_model,
                self.here,
                self.losses,
                loss_scale=self.loss_scale,
                context=context,
            )
            rounding = _errors(rounded, expected)
            failures = {
                part: one
                for part, one in failures.items()
                if one > _ROUNDING_MARGIN * rounding[part]
            }
        return failures

    def _first_module(self, failures: Mapping[Part, float]) -> str:
        """Return the first module whose output differs or, of gradients, the last."""
        if any(part.kind != "gradients" for part in failures):
            for there, here in zip(self.there, self.here, strict=True):
                expected = record_calls(self.cpu_model, here.inputs)
                actual = record_calls(self.model, there.inputs)
                for name in sorted(expected, key=lambda one: expected[one].ended):
                    limit = TOLERANCES[self.precision].logits
                    if name in actual and not _output_error(actual[name], expected[name]) <= limit:
                        return name
        wrong = [part.name for part in failures if part.kind == "gradients"]
        return module_of(wrong[-1]) if wrong else ""


@dataclass(frozen=True)
class _Results:
    """What a model computes of micro-batches without dropout; all in fp32 on the CPU.

    Args:
        evaluation: Logits of each micro-batch, without gradients.
        logits: Of the last, with gradients: float32 of shape [examples, classes].
        loss: Of the last, as in training: a scalar.
        gradients: By parameter that trains.
    """

    evaluation: Sequence[torch.Tensor]
    logits: torch.Tensor
    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]


def _compute(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    losses: Losses,
    *,
    loss_scale: float = 1.0,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> _Results:
    """Return the results of a model; the gradients that its parameters have stay as they are."""

    def forward(one: MicroBatch) -> torch.Tensor:
        with context():
            logits: torch.Tensor = model(**one.inputs).logits.float()
            return logits

    with torch.inference_mode():
        evaluation = [forward(one).cpu() for one in micro_batches]
    last = micro_batches[-1]
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.enable_grad():
        logits = forward(last)
        loss = weighted_loss(logits, last, losses)
        # The loss of what is learned has a gradient of nothing but rounding.
        signed_mean = (logits * _signs(logits.shape).to(logits.device)).sum() / len(logits)
        gradients = torch.autograd.grad(
            (loss + signed_mean) * loss_scale, list(trained.values()), materialize_grads=True
        )
    named = zip(trained, gradients, strict=True)
    return _Results(
        evaluation=evaluation,
        logits=logits.detach().cpu(),
        loss=loss.detach().cpu(),
        gradients={name: one.cpu() / loss_scale for name, one in named},
    )


def _signs(shape: torch.Size) -> torch.Tensor:
    """Return 1 and -1 in turn."""
    return (1 - 2 * (torch.arange(shape.numel()) % 2)).reshape(shape)


def _errors(actual: _Results, expected: _Results) -> dict[Part, float]:
    """Return the relative error of each part, in the order in which they are computed."""
    evaluated = zip(actual.evaluation, expected.evaluation, strict=True)
    errors = {
        Part("evaluation", str(number)): worst_example_error(*pair)
        for number, pair in enumerate(evaluated)
    }
    errors[Part("logits", "")] = worst_example_error(actual.logits, expected.logits)
    # A loss can be as small as the rounding of logits.
    distance = (actual.loss - expected.loss).abs().item()
    size = max(expected.loss.item(), mean_norm(expected.logits))
    errors[Part("loss", "")] = ratio(distance, size)
    gradients = parameter_errors(actual.gradients, expected.gradients)
    return errors | {Part("gradients", name): error for name, error in gradients.items()}


def _output_error(actual: Call, expected: Call) -> float:
    """Return the relative error of a module's output, 0 where it is no tensor."""
    outputs = actual.first_output, expected.first_output
    if not all(isinstance(one, torch.Tensor) for one in outputs):
        return 0.0
    here, there = (one.float().cpu() for one in outputs)
    return ratio((here - there).norm().item(), there.norm().item())
