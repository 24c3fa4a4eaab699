"""Compares a device with the CPU: a few examples, the same weights, logits and gradients.

A GPU may compute wrongly without an error. A run compares before its first step, and before its
best model is kept; ``finetune doctor --parity`` compares batches of more shapes.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.devices.base import Device, without_tf32
from finetune.devices.cpu import CpuDevice
from finetune.errors import DeviceDiffers
from finetune.events import Emit, WarningMessage
from finetune.model.feature_extractor import FeatureExtractor, unread_parameters
from finetune.model.freeze import set_training
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.step import Losses, TrainingState, weighted_loss

# What is compared, and of which batch or parameter.
Part = tuple[str, str]
Results = dict[Part, torch.Tensor]

# The largest relative errors that pass, of logits and of gradients. In fp32 far above rounding, and
# below what TF32 does: logits were off by 1e-3 with it on an H200, and by 3e-6 without. A rounding
# errs by up to 2⁻⁸ of a number in bf16 and 2⁻¹¹ in fp16. BERT-base was off there by 3 to 4 of these
# in logits and 5 to 6 in gradients; what passes is 10 and 25.
_TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (4e-2, 1e-1), "fp16": (5e-3, 1.25e-2)}
# More passes in 16 bits for examples that are hard to compute: this many times the CPU's rounding.
_ROUNDING_MARGIN = 3.0
# In bf16 an H200 exceeded the tolerance of one gradient once in 500 comparisons.
_ATTEMPTS_IN_16_BITS = 3
# So far below the loss scale of training that no gradient of other examples overflows.
_LOSS_SCALE_MARGIN = 64
# Of a micro-batch of a run: examples, tokens with padding, tokens of an example.
_MAX_EXAMPLES, _MAX_TOKENS, _MAX_LENGTH = 8, 512, 64


@dataclass(frozen=True)
class Difference:
    """How far a tensor on the device is from the same on the CPU.

    Args:
        part: ``evaluation`` (logits without gradients), ``logits``, ``loss`` or ``gradients``.
        tensor: The shape of the batch, or the name of the parameter.
        error: Relative; infinite where the device computed NaN.
        tolerance: The largest error that passes.
    """

    part: str
    tensor: str
    error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        size = f"off by {self.error:.2%}" if math.isfinite(self.error) else "not numbers"
        return f"{self.part} ({self.tensor}) {size}, {self.tolerance:.2%} passes"


def check_device(
    state: TrainingState,
    examples: Examples,
    *,
    step: int,
    padded_lengths: Sequence[int],
    batch_size: int,
    emit: Emit,
) -> None:
    """Compare the device with the CPU between two steps; the state stays as it is.

    For a while it takes memory: on the device that of the gradients, on the CPU that of weights and
    gradients. If there is not enough, a warning says so.

    Args:
        step: Steps that have been taken.
        padded_lengths: Those of the run, ascending: the fewest tokens, for which attention has been
            wrong, and as many as is quick are compared.

    Raises:
        DeviceDiffers: If the device computes something else.
    """
    rows, device = examples.without_windows(), state.device
    shortest, *longer = [one for one in padded_lengths if one >= rows.lengths.min()]
    shapes = [
        (min(_MAX_EXAMPLES, _MAX_TOKENS // length or 1, batch_size), length)
        for length in (shortest, *[one for one in longer if one <= _MAX_LENGTH][-1:])
    ]
    is_exact = state.accelerator.precision == "fp32"
    try:
        for attempt in range(1 if is_exact else _ATTEMPTS_IN_16_BITS):
            differences = compare_with_cpu(state, rows, shapes, seed=(step, attempt))
            failures = [one for one in differences if not one.passes]
            if not failures:
                return
    except (RuntimeError, MemoryError) as error:
        if not any(one.memory.is_out_of_memory(error) for one in (device, CpuDevice())):
            raise
        device.memory.release()
        message = f"not enough memory to compare {device.name} with the CPU: the run continues"
        emit(WarningMessage(message, remedy="lower --batch-size, or use --no-check-device"))
        return
    raise _device_differs(device, f"after step {step:,}: {failures[0]}")


def _device_differs(device: Device, found: str) -> DeviceDiffers:
    return DeviceDiffers(
        f"{device.name} differs from the CPU {found}",
        remedy="start again with --overwrite --device cpu; finetune doctor --parity "
        f"--device {device.name} shows more",
    )


def compare_with_cpu(
    state: TrainingState,
    examples: Examples,
    shapes: Sequence[tuple[int, int]],
    *,
    seed: int | Sequence[int] = 0,
) -> list[Difference]:
    """Compare logits of random examples, and of the last shape loss and gradients, with the CPU's.

    Args:
        state: Its parameters and random numbers stay as they are; its gradients are dropped.
        examples: Each is read at once.
        shapes: Number of examples and padded length of each batch.
    """
    state.optimizer.zero_grad(set_to_none=True)
    state.model.train(False)
    cpu, precision = CpuDevice(), state.accelerator.precision
    loss_scale = max(1.0, state.accelerator.loss_scale / _LOSS_SCALE_MARGIN)
    least_examples = state.device.shapes.min_examples
    shapes = [(max(count, least_examples), length) for count, length in shapes]
    try:
        cpu_model = _copy_to_cpu(state)
        batches, cpu_batches = (
            _pick_batches(examples, shapes, device, seed) for device in (state.device, cpu)
        )
        with without_tf32():
            actual = _compute(state.model, batches, state.losses, loss_scale=loss_scale)
            expected = _compute(cpu_model, cpu_batches, state.losses)
            errors = _errors(actual, expected)
            limits = {part: _TOLERANCES[precision][part[0] == "gradients"] for part in errors}
            if precision != "fp32" and any(not errors[part] <= limits[part] for part in errors):
                rounded = _compute(
                    cpu_model, cpu_batches, state.losses, loss_scale=loss_scale,
                    context=partial(cpu.autocast, precision),
                )  # fmt: skip
                for part, rounding in _errors(rounded, expected).items():
                    limits[part] = max(limits[part], _ROUNDING_MARGIN * rounding)
    finally:
        set_training(state.model)
    return [Difference(*part, error, limits[part]) for part, error in errors.items()]


def _copy_to_cpu(state: TrainingState) -> nn.Module:
    """Return the model in fp32 on the CPU, without what no forward reads."""
    unread = unread_parameters(state.model)
    # deepcopy takes what its memo has in place of copies.
    memo: dict[int, Any] = {id(one): one.cpu() for one in state.model.buffers()}
    for name, one in state.model.named_parameters():
        values = torch.zeros(()).expand(one.shape) if name in unread else one.detach().cpu()
        memo[id(one)] = nn.Parameter(values, requires_grad=one.requires_grad)
    return state.accelerator.unwrap(copy.deepcopy(state.model, memo)).eval()


def _pick_batches(
    examples: Examples,
    shapes: Iterable[tuple[int, int]],
    device: Device,
    seed: int | Sequence[int],
) -> dict[str, MicroBatch]:
    """Return micro-batches of random examples on a device, the same on each."""
    random, batches = np.random.default_rng(seed), {}
    for count, length in shapes:
        fitting = np.flatnonzero(examples.lengths <= length)
        batch = Batch(random.choice(fitting, count, replace=len(fitting) < count), length)
        [micro_batch] = cut_batch(examples, batch, batch_size=count, device=device)
        assert isinstance(micro_batch, MicroBatch), "no example has windows"
        batches[f"{count} x {length} tokens"] = micro_batch
    return batches


def _compute(
    model: nn.Module,
    batches: Mapping[str, MicroBatch],
    losses: Losses,
    *,
    loss_scale: float = 1.0,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Results:
    """Return what a model computes of batches, in fp32 on the CPU."""

    def forward(batch: MicroBatch) -> torch.Tensor:
        with context():
            logits: torch.Tensor = model(**batch.inputs).logits.float()
            return logits

    with torch.inference_mode():
        results = {("evaluation", name): forward(one).cpu() for name, one in batches.items()}
    name, batch = list(batches.items())[-1]
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.enable_grad():
        logits = forward(batch)
        loss = weighted_loss(logits, batch, losses)
        # Once an example is learned, its gradient is only rounding noise: add one of the logits.
        signs = 1 - 2 * (torch.arange(logits.numel(), device=logits.device) % 2)
        signed_mean = (logits * signs.reshape(logits.shape)).sum() / len(logits)
        scaled = (loss + signed_mean) * loss_scale
        gradients = torch.autograd.grad(scaled, list(trained.values()), materialize_grads=True)
    results["logits", name] = logits.detach().cpu()
    results["loss", name] = loss.detach().cpu()
    named = zip(trained, gradients, strict=True)
    return results | {("gradients", name): one.cpu() / loss_scale for name, one in named}


def _errors(actual: Results, expected: Results) -> dict[Part, float]:
    """Return the relative error of each tensor."""
    errors: dict[Part, float] = {}
    gradients = {name: one for (part, name), one in expected.items() if part == "gradients"}
    least_sizes = _root_mean_squares(gradients)
    for part, tensor in expected.items():
        kind, name = part
        distance = actual[part] - tensor
        if kind == "gradients":
            least_size = least_sizes[module_of(name)] * math.sqrt(tensor.numel())
            errors[part] = _ratio(distance.norm().item(), max(tensor.norm().item(), least_size))
        elif kind == "loss":
            # A loss can be as small as the rounding of logits.
            size = max(tensor.item(), _mean_norm(expected["logits", name]))
            errors[part] = _ratio(distance.abs().item(), size)
        else:
            errors[part] = worst_example_error(actual[part], tensor)
    return errors


def _root_mean_squares(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return that of each module's numbers, at least a hundredth of that of all.

    Some gradients are zero but for rounding, such as that of the bias of attention's keys, and
    are compared with the size of others in the module.
    """
    by_module: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for name, one in gradients.items():
        by_module[module_of(name)].append((one.norm().item() ** 2, one.numel()))

    def mean(pairs: Iterable[tuple[float, int]]) -> float:
        squares, numbers = zip(*pairs, strict=True)
        return math.sqrt(sum(squares) / sum(numbers))

    least = mean(pair for pairs in by_module.values() for pair in pairs) / 100
    return {module: max(least, mean(pairs)) for module, pairs in by_module.items()}


def worst_example_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the worst example's difference over the mean norm of the examples.

    One wrong example among many counts as if alone. Shapes: [examples, numbers].
    """
    return _ratio((actual - expected).norm(dim=-1).max().item(), _mean_norm(expected))


def _mean_norm(examples: torch.Tensor) -> float:
    return float(examples.norm(dim=-1).square().mean().sqrt())


def _ratio(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    return distance / size if size > 0 and not math.isnan(distance) else math.inf


def module_of(parameter: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class FeatureCheck:
    """Features of a few training examples, as the CPU computes them in fp32.

    Args:
        features: float32 of shape [examples, numbers], 0 for padding.
    """

    indices: NDArray[np.int64]
    padded_length: int
    features: torch.Tensor

    @classmethod
    def prepare(cls, extractor: FeatureExtractor, examples: Examples) -> "FeatureCheck":
        """Compute the features of examples from the shortest to the longest, on the CPU."""
        by_length = np.argsort(examples.lengths, kind="stable")
        places = np.linspace(0, len(by_length) - 1, min(_MAX_EXAMPLES, len(by_length)))
        indices = by_length[places.astype(np.int64)]
        padded_length = int(examples.lengths[indices].max())
        inputs = examples.inputs_of(indices, padded_length)
        features = extractor.extract(inputs)
        if extractor.per_token:
            features = features * inputs["attention_mask"].reshape(len(indices), -1, 1)
        return cls(indices, padded_length, features.flatten(1))

    def compare(self, examples: Examples, *, device: Device, precision: str) -> None:
        """Raise ``DeviceDiffers`` if the stored features of the examples are others."""
        stored = examples.inputs_of(self.indices, self.padded_length)["inputs_embeds"]
        error = worst_example_error(stored.flatten(1), self.features)
        # Logits have a smaller tolerance, for examples whose rounding is known.
        _, tolerance = _TOLERANCES[precision]
        if not error <= tolerance:
            found = f"in the features of the frozen layers: off by {error:.2%}"
            raise _device_differs(device, f"{found}, {tolerance:.2%} passes")
