"""Compares a device with the CPU: the same weights, the same texts, the same updates."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from finetune.config.schema import ModelConfig
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.precision import without_tf32
from finetune.devices.select import check_precision, select_device
from finetune.doctor.models import pretrained_classifier, random_classifier, with_stars
from finetune.doctor.rehearsal import Rehearsal, Tensors, plan_rehearsal
from finetune.events import Emit, Stage
from finetune.model.mode import Mode
from finetune.runs.precision import note_parity

# Of the root mean square of all numbers of a model.
_SMALLEST_SHARE = 0.01


class Tolerance(NamedTuple):
    """The largest relative errors that pass, in one precision.

    Those of changes by updates are the largest: AdamW's steps are not in proportion to the
    gradients, and a small step may be lost in the rounding of a weight.
    """

    logits: float
    gradients: float
    updates: float

    def of(self, part: str) -> float:
        """Return the tolerance of a part of the rehearsal; a loss has that of logits."""
        if part in ("evaluation", "logits", "loss"):
            return self.logits
        return self.gradients if part == "gradients" else self.updates


# In fp32 far above rounding, and below what TF32 does: logits were off by 1e-3 with it on an H200,
# and by 3e-6 without. A rounding errs by up to 2⁻⁸ of a number in bf16 and 2⁻¹¹ in fp16. BERT-base
# was off there by 3 to 4 of these in logits, 5 to 6 in gradients and 12 to 14 in changes; what
# passes is 10, 25 and 50.
TOLERANCES = {
    "fp32": Tolerance(logits=1e-4, gradients=1e-3, updates=1e-2),
    "bf16": Tolerance(logits=4e-2, gradients=1e-1, updates=2e-1),
    "fp16": Tolerance(logits=5e-3, gradients=1.25e-2, updates=2.5e-2),
}


@dataclass(frozen=True)
class Difference:
    """How far a tensor on the device is from the same on the CPU.

    Args:
        part: What was computed, such as ``gradients``.
        tensor: Name of the parameter or, of logits, the shape of the batch.
        error: Relative error; infinite where the device computed NaN.
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

    @property
    def module(self) -> str:
        """The module that the parameter belongs to, with ``*`` for numbers."""
        return with_stars(_module_of(self.tensor))


@dataclass(frozen=True)
class ParityReport:
    """How far a device is from the CPU in fp32, by all that was compared, in that order."""

    device: str
    precision: str
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The differences that are too large."""
        return tuple(one for one in self.differences if not one.passes)

    def worst_by_part(self) -> dict[str, Difference]:
        """Return the worst difference of each part."""
        return _worst_by_part(self.differences)

    def worst_by_module(self) -> dict[str, dict[str, Difference]]:
        """Return the worst difference of each module with parameters, by part."""
        by_module: defaultdict[str, list[Difference]] = defaultdict(list)
        for one in self.differences:
            by_module[one.module].append(one)
        by_module.pop("", None)
        return {module: _worst_by_part(some) for module, some in by_module.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, with null for infinity."""
        return {
            "schema_version": 1,
            "device": self.device,
            "precision": self.precision,
            "passes": not self.failures,
            "differences": [
                asdict(one) | {"error": one.error if math.isfinite(one.error) else None}
                for one in self.differences
            ],
        }


def compare_with_cpu(
    device: str, *, model: str | None, mode: Mode, precision: str, batch_size: int, emit: Emit
) -> ParityReport:
    """Compare what a device, maybe the CPU itself, computes with what the CPU computes in fp32.

    The verdict is kept: where 16 bits are not to be trusted, ``--precision auto`` needs it.

    Args:
        device: One of ``DEVICE_NAMES``.
        model: A folder, a Hub id, or ``minilm``; None for BERT-base with random weights.
        mode: What trains.
        precision: ``fp32``, ``bf16`` or ``fp16``, of the device.
        batch_size: The most examples in one forward of an evaluation.
        emit: Receives progress events.

    Raises:
        FinetuneError: If the device or the model can't be used.
    """
    there = select_device(device, emit=emit)
    check_precision(there, precision)
    if model is None:
        classifier = random_classifier(ModelConfig.model)
    else:
        classifier = pretrained_classifier(model, emit=emit)
    rehearsal = plan_rehearsal(classifier, mode=mode, largest_batch=batch_size)
    report = check_parity(rehearsal, device=there, precision=precision, emit=emit)
    subject = f"{model or ModelConfig.model}, {mode}"
    note_parity(there, precision=precision, subject=subject, passes=not report.failures)
    return report


def check_parity(
    rehearsal: Rehearsal, *, device: Device, precision: str, emit: Emit
) -> ParityReport:
    """Compare a device with the CPU by the evaluations and updates of a model."""
    with without_tf32():
        emit(Stage("computing on the CPU in fp32"))
        expected = dict(rehearsal.on(CpuDevice(), precision="fp32"))
        emit(Stage(f"computing on {device.name} ({device.description}) in {precision}"))
        actual = rehearsal.on(device, precision=precision)
        differences = tuple(compare(actual, expected, tolerance=TOLERANCES[precision]))
    return ParityReport(device.name, precision, differences)


def compare(
    actual: Iterable[tuple[str, Tensors]], expected: dict[str, Tensors], *, tolerance: Tolerance
) -> Iterator[Difference]:
    """Compare part by part; empty ``expected`` on the way, as a part is as large as the model."""
    for part, tensors in actual:
        for name, error in _errors(tensors, expected.pop(part)).items():
            yield Difference(part, name, error, tolerance.of(part))


def _errors(actual: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the relative error of each tensor of a part: of parameters by module, or of logits."""
    sizes = _least_sizes(expected)
    return {
        name: relative_error(actual[name], one, least_size=sizes[_module_of(name)])
        if _module_of(name)
        else worst_example_error(actual[name], one)
        for name, one in expected.items()
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor, *, least_size: float) -> float:
    """Return the norm of the difference of two tensors over the norm of what is expected.

    Some gradients are zero but for rounding, as is that of the bias of attention's keys. So the
    expected numbers are taken to have a root mean square of at least ``least_size``.
    """
    distance = (actual - expected).norm().item()
    size = max(expected.norm().item(), least_size * math.sqrt(expected.numel()))
    return _ratio(distance, size)


def worst_example_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the worst example's difference over the mean norm of the examples.

    One wrong example among many counts as if alone. Shapes: [examples, numbers] or [numbers].
    """
    distance = (actual - expected).norm(dim=-1).max().item()
    return _ratio(distance, expected.norm(dim=-1).square().mean().sqrt().item())


def _ratio(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    # NaN is never right.
    return distance / size if size > 0 and not math.isnan(distance) else math.inf


def _least_sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the root mean square of each module's numbers, at least a hundredth of that of all."""
    by_module: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for name, one in tensors.items():
        by_module[_module_of(name)].append(one)
    least = _root_mean_square(tensors.values()) * _SMALLEST_SHARE
    return {module: max(least, _root_mean_square(some)) for module, some in by_module.items()}


def _root_mean_square(tensors: Iterable[torch.Tensor]) -> float:
    pairs = [(one.norm().item() ** 2, one.numel()) for one in tensors]
    return math.sqrt(sum(square for square, _ in pairs) / sum(numbers for _, numbers in pairs))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _worst_by_part(differences: Iterable[Difference]) -> dict[str, Difference]:
    worst: dict[str, Difference] = {}
    for one in differences:
        worst[one.part] = max(worst.get(one.part, one), one, key=lambda each: each.error)
    return worst
