"""Sanity checks during training, because a GPU can silently compute wrong results.

Losses and parameters must be finite, and the device must agree with the CPU: in logits, gradients
and the changes of one optimizer step.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from finetune.devices.base import Device, without_tf32
from finetune.devices.cpu import CpuDevice
from finetune.errors import FinetuneError, LossNotFiniteError
from finetune.events import WarningMessage, emit
from finetune.model.features import FrozenLayers
from finetune.tokenization.examples import Batch, Examples, Inputs
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.optimizers import total_norm
from finetune.training.trainer import Trainer

_REMEDY = (
    "start again with --overwrite --device cpu; finetune doctor --parity --device {} shows details"
)
# By part and name, as in a Difference.
Results = dict[tuple[str, str], torch.Tensor]
Shapes = Sequence[tuple[int, int]]

# Maximum relative errors. In fp32 they are far above rounding and below the error of TF32: on an
# H200, logits were off by 1e-3 with TF32, and by 3e-6 without. In 16 bits, logits of BERT-base were
# off by 3 to 4 units of rounding (2⁻⁸ in bf16, 2⁻¹¹ in fp16), gradients by 5 to 6. The limits are
# 10 and 25 units. Changes are computed in fp32 from equal gradients, and a fault is an error of 1.
_TOLERANCES = {
    "fp32": {"logits": 1e-4, "gradients": 1e-3, "changes": 1e-2},
    "bf16": {"logits": 4e-2, "gradients": 1e-1, "changes": 1e-2},
    "fp16": {"logits": 5e-3, "gradients": 1.25e-2, "changes": 1e-2},
}
# Learning rate of the compared step: so large that fp32 resolves the change of any weight.
_RATE = 1.0
# Adam's first updates are about as large as the learning rate, unless a gradient is close to its
# epsilon. The error of such changes is relative to this fraction of the learning rate.
_LEAST_CHANGE = 1e-2
# In bf16 an H200 exceeded the tolerance of one gradient once in 500 comparisons, so a fault must
# also show on other examples.
_ATTEMPTS_IN_16_BITS = 3
# The comparison divides the loss scale of training by this factor, so that nothing overflows.
_LOSS_SCALE_MARGIN = 64
# Limits of a compared micro-batch: examples, tokens with padding, tokens per example.
_MAX_EXAMPLES, _MAX_TOKENS, _MAX_LENGTH = 8, 128, 64


@dataclass(frozen=True)
class Difference:
    """Relative error of ``logits``, ``gradients`` or ``changes`` of parameters against the CPU.

    NaN has the error infinity.
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
        size = f"off by {self.error:.2%}" if math.isfinite(self.error) else "NaN"
        return f"{self.part} ({self.tensor}) {size} (tolerance {self.tolerance:.2%})"


def check_device(trainer: Trainer, examples: Examples, *, step: int) -> None:
    """Compare the device with the CPU between two steps, without changing weights or optimizer.

    Use two padded lengths: the smallest, where attention was wrong in the past, and the largest
    that is fast. Raise ``FinetuneError`` if they differ. If memory runs out, only warn.
    """
    examples, device = examples.without_windows(), trainer.device
    padded_lengths, batch_size = trainer.plan.padded_lengths, trainer.batch_size.examples
    shortest, *longer = [length for length in padded_lengths if length >= examples.lengths.min()]
    shapes = [
        (min(_MAX_EXAMPLES, _MAX_TOKENS // length or 1, batch_size), length)
        for length in (shortest, *[length for length in longer if length <= _MAX_LENGTH][-1:])
    ]
    attempts = 1 if trainer.plan.precision == "fp32" else _ATTEMPTS_IN_16_BITS
    try:
        for attempt in range(attempts):
            differences = compare_with_cpu(trainer, examples, shapes, seed=step + attempt)
            failures = [difference for difference in differences if not difference.passes]
            if not failures:
                return
    except (RuntimeError, MemoryError) as error:
        if not any(side.memory.is_out_of_memory(error) for side in (device, CpuDevice())):
            raise
        device.memory.release()
        message = f"{device.name} is not compared with the CPU: not enough memory"
        emit(WarningMessage(message, remedy="lower --batch-size, or use --no-check-device"))
        return
    message = f"{device.name} differs from the CPU after step {step:,}: {failures[0]}"
    raise FinetuneError(message, remedy=_REMEDY.format(device.name))


def compare_with_cpu(
    trainer: Trainer, examples: Examples, shapes: Shapes, *, seed: int = 0
) -> list[Difference]:
    """Compare logits of random examples, gradients of the last batch, and a step with the CPU's.

    A shape is a batch's number of examples and padded length. The model is left in evaluation mode.
    Weights, optimizer and random states don't change.
    """
    model = trainer.model
    loss_scale = max(1.0, trainer.scaler.get_scale() / _LOSS_SCALE_MARGIN)
    least = trainer.device.shapes.min_examples
    shapes = [(max(count, least), length) for count, length in shapes]
    trainer.optimizer.zero_grad(set_to_none=True)
    model.train(False)
    trained, weights = trainer.trained_parameters(), dict[str, torch.Tensor]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to("cpu", dtype, copy=True)
        weights[name] = copied.requires_grad_(tensor.requires_grad)

    def on_cpu(inputs: Inputs) -> torch.Tensor:
        logits: torch.Tensor = functional_call(model, weights, kwargs=inputs).logits
        return logits

    batches = _pick_batches(examples, shapes, trainer.device, seed)
    cpu_batches = _pick_batches(examples, shapes, CpuDevice(), seed)
    cpu_trained = {name: weights[name] for name in trained}
    with without_tf32():
        actual = _compute(trainer.logits, trained, batches, trainer.loss, loss_scale)
        expected = _compute(on_cpu, cpu_trained, cpu_batches, trainer.loss)
    _add_changes(trainer, weights, actual, expected)
    return list(_differences(actual, expected, _TOLERANCES[trainer.plan.precision]))


def _pick_batches(
    examples: Examples, shapes: Shapes, device: Device, seed: int
) -> dict[str, MicroBatch]:
    """Draw micro-batches of random examples on a device, the same for each device."""
    random, batches = np.random.default_rng(seed), {}
    for count, length in shapes:
        fitting = np.flatnonzero(examples.lengths <= length)
        batch = Batch(random.choice(fitting, count, replace=len(fitting) < count), length)
        [micro_batch] = cut_batch(examples, batch, batch_size=count, device=device)
        batches[f"{count} x {length} tokens"] = micro_batch
    return batches


def _compute(
    forward: Callable[[Inputs], torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    batches: Mapping[str, MicroBatch],
    loss_of: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
    loss_scale: float = 1.0,
) -> Results:
    """Compute the logits of all batches and the gradients of the last batch, on the CPU."""
    results: Results = {}
    for number, (shape, batch) in enumerate(batches.items(), start=1):
        # Attention without gradients uses different kernels.
        with torch.set_grad_enabled(number == len(batches)):
            logits = forward(batch.inputs).float()
        results["logits", shape] = logits.detach().cpu()
    loss = loss_of(logits, batch)
    # The gradient of a learned example is only rounding noise, so add a gradient of the logits.
    signs = 1 - 2 * (torch.arange(logits.numel(), device=logits.device) % 2)
    signed_mean = (logits * signs.reshape(logits.shape)).sum() / len(logits)
    scaled = (loss + signed_mean) * loss_scale
    gradients = torch.autograd.grad(scaled, list(trained.values()), materialize_grads=True)
    for name, gradient in zip(trained, gradients, strict=True):
        results["gradients", name] = gradient.cpu() / loss_scale
    return results


def _add_changes(
    trainer: Trainer, weights: Mapping[str, torch.Tensor], actual: Results, expected: Results
) -> None:
    """Add how the first step of an optimizer changes parameters, which are restored.

    On MPS, operations on tensors of some layouts failed without an error: an encoder that should
    train stayed frozen (pytorch#118115). Both sides use the gradients of the device, because the
    size of a gradient hardly affects the step, but its sign may be due to rounding.
    """
    groups = [{**group, "lr": _RATE} for group in trainer.optimizer.param_groups]
    optimizer = type(trainer.optimizer)(groups)
    before = {name: weight.detach() for name, weight in weights.items()}
    trained = trainer.trained_parameters()
    names = {parameter: name for name, parameter in trained.items()}
    try:
        for name, parameter in trained.items():
            parameter.grad = actual["gradients", name].to(parameter.device)
        optimizer.step()
        for name, parameter in trained.items():
            actual["changes", name] = parameter.detach().cpu() - before[name]
    finally:
        optimizer.zero_grad()
        for name, parameter in trained.items():
            parameter.detach().copy_(before[name])
    for group in groups:
        for name in map(names.__getitem__, group["params"]):
            gradient = actual["gradients", name]
            step = gradient / (gradient.abs() + group["eps"])
            expected["changes", name] = -_RATE * (step + group["weight_decay"] * before[name])


def _differences(
    actual: Results, expected: Results, tolerances: Mapping[str, float]
) -> Iterator[Difference]:
    """Yield the error of each tensor.

    Some gradients are zero except for rounding, such as gradients of key biases in attention. So an
    error is relative to the mean size in its module, or to a hundredth of the mean in the model.
    """
    by_module = defaultdict[str, list[torch.Tensor]](list)
    for (part, name), tensor in expected.items():
        if part == "gradients":
            by_module[name.rpartition(".")[0]].append(tensor)
    mean_size = {module: _mean_size(tensors) for module, tensors in by_module.items()}
    least = _mean_size([*chain.from_iterable(by_module.values())]) / 100
    for (part, name), tensor in expected.items():
        if part == "logits":
            error = _worst_example_error(actual[part, name], tensor)
        else:
            size = max(least, mean_size[name.rpartition(".")[0]])
            if part == "changes":
                size = _RATE * _LEAST_CHANGE
            distance = (actual[part, name] - tensor).norm().item()
            error = _ratio(distance, max(tensor.norm().item(), size * math.sqrt(tensor.numel())))
        yield Difference(part, name, error, tolerances[part])


def _mean_size(tensors: Sequence[torch.Tensor]) -> float:
    return total_norm(tensors).item() / math.sqrt(sum(tensor.numel() for tensor in tensors))


def _worst_example_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error of the worst example in [examples, values], relative to the mean example."""
    mean_norm = expected.norm(dim=-1).square().mean().sqrt().item()
    return _ratio((actual - expected).norm(dim=-1).max().item(), mean_norm)


def _ratio(distance: float, size: float) -> float:
    ratio = distance / max(size, sys.float_info.min)
    return math.inf if math.isnan(ratio) else ratio


def prepare_feature_check(layers: FrozenLayers, examples: Examples) -> Callable[[Examples], None]:
    """Compute features of a few examples on the CPU. Return a check of the stored features."""
    quick = np.flatnonzero(examples.lengths <= max(_MAX_LENGTH, examples.lengths.min()))
    indices = np.random.default_rng(0).permutation(quick)[:_MAX_EXAMPLES]
    padded_length = int(examples.lengths[indices].max())
    inputs = examples.inputs_of(indices, padded_length)
    mask = inputs["attention_mask"] if layers.per_token else None
    features = layers.trainable_inputs(layers.extract(inputs), mask)["inputs_embeds"]

    def check(stored: Examples) -> None:
        actual = stored.inputs_of(indices, padded_length)["inputs_embeds"]
        error = _worst_example_error(actual.flatten(1), features.flatten(1))
        # The tolerance for gradients, because single vectors are rounded more than logits.
        tolerance = _TOLERANCES[layers.precision]["gradients"]
        if not error <= tolerance:
            raise FinetuneError(
                f"{layers.device.name} differs from the CPU in the features of the frozen layers: "
                f"off by {error:.2%} (tolerance {tolerance:.2%})",
                # The wrong features are stored by now.
                remedy=f"run finetune cache clear, then {_REMEDY.format(layers.device.name)}",
            )

    return check


def check_losses(losses: Sequence[float], batches: Sequence[Batch], *, last_step: int) -> None:
    """Raise ``LossNotFiniteError`` with step and examples of the first NaN or infinite loss."""
    for index, (loss, batch) in enumerate(zip(losses, batches, strict=True)):
        if not math.isfinite(loss):
            raise LossNotFiniteError(
                f"the loss is {loss} at step {last_step - len(losses) + index + 1}",
                remedy="lower --learning-rate, use --precision fp32, or look at these texts",
                examples=batch.indices.tolist(),
            )


def check_parameters_finite(parameters: Mapping[str, nn.Parameter], *, step: int) -> None:
    """Reject NaN or infinite parameters, which the loss would reveal only one step later."""
    if not total_norm(parameter.detach() for parameter in parameters.values()).isfinite():
        raise LossNotFiniteError(
            f"parameters are NaN or infinite after step {step}",
            remedy="lower --learning-rate, or use --precision fp32",
        )
