"""Compares a device with the CPU: the same weights, the same texts, the same steps."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from finetune.config.mode import Mode
from finetune.config.schema import ModelConfig
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.precision import without_tf32
from finetune.devices.select import check_precision, select_device
from finetune.doctor.models import CLASSES, SEED, pretrained_classifier, with_stars
from finetune.doctor.rehearsal import Rehearsal, Tensors, plan_rehearsal
from finetune.events import Emit, Info
from finetune.model.shape import random_classifier
from finetune.runs.precision import note_parity
from finetune.training.tolerances import (
    TOLERANCES,
    Tolerance,
    module_of,
    parameter_errors,
    worst_example_error,
)


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
        return with_stars(module_of(self.tensor))


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
        classifier = random_classifier(ModelConfig.model, classes=CLASSES, seed=SEED)
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
    """Compare a device with the CPU by the evaluations and steps of a model."""
    with without_tf32():
        emit(Info("computing on the CPU in fp32"))
        expected = dict(rehearsal.on(CpuDevice(), precision="fp32"))
        emit(Info(f"computing on {device.name} ({device.description}) in {precision}"))
        actual = rehearsal.on(device, precision=precision)
        differences = tuple(compare(actual, expected, tolerance=TOLERANCES[precision]))
    return ParityReport(device.name, precision, differences)


def compare(
    actual: Iterable[tuple[str, Tensors]], expected: dict[str, Tensors], *, tolerance: Tolerance
) -> Iterator[Difference]:
    """Compare part by part; empty ``expected`` on the way, as a part is as large as the model."""
    for part, tensors in actual:
        for name, error in _errors(part, tensors, expected.pop(part)).items():
            yield Difference(part, name, error, tolerance.of(part))


def _errors(part: str, actual: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the relative error of each tensor of a part: of parameters by module, or of logits."""
    if part not in ("evaluation", "logits", "loss"):
        return parameter_errors(actual, expected)
    return {name: worst_example_error(actual[name], one) for name, one in expected.items()}


def _worst_by_part(differences: Iterable[Difference]) -> dict[str, Difference]:
    worst: dict[str, Difference] = {}
    for one in differences:
        worst[one.part] = max(worst.get(one.part, one), one, key=lambda each: each.error)
    return worst
