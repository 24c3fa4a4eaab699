"""The findings of ``doctor --parity``, with faults planted in the device."""

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from planted_faults import plant
from tiny_models import ARCHITECTURES, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from finetune.batch_finder.trial_model import TrialModel
from finetune.config.schema import Mode
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.doctor import models
from finetune.doctor.models import ParityReport, compare_model


def compare(
    model: PreTrainedModel,
    *,
    mode: str = "full",
    device: Device | None = None,
    precision: str = "fp32",
) -> ParityReport:
    return compare_model(
        model, device or CpuDevice(), mode=Mode(mode), precision=precision, max_batch_size=40
    )


@cache
def report_of(
    architecture: str = "bert", mode: str = "full", precision: str = "fp32"
) -> ParityReport:
    """Compare the CPU with itself, and cache the result."""
    return compare(tiny_model(architecture), mode=mode, precision=precision)


def lively_model() -> PreTrainedModel:
    """Return a model whose attention affects the result, unlike a newly initialized BERT."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(9)
    return model


@pytest.fixture
def plant_fault(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that plants a fault in the compared model."""

    def plant_later(fault: Any, by: Any = plant) -> None:
        prepare = models.prepare_trial_model

        def prepare_with_fault(*arguments: Any, **options: Any) -> TrialModel:
            trial = prepare(*arguments, **options)
            by(trial.trainer, fault)
            return trial

        monkeypatch.setattr(models, "prepare_trial_model", prepare_with_fault)

    return plant_later


def wrong_parts(report: ParityReport) -> set[str]:
    return {one.part for one in report.failures}


def test_the_cpu_computes_what_it_computes() -> None:
    report = report_of()
    assert {one.error for one in report.differences} == {0.0}
    assert list(report.worst_by_part()) == ["logits", "gradients"]
    evaluated = [one.tensor for one in report.differences if one.part == "logits"]
    assert evaluated[:-1] == [
        f"{size} x {length} tokens"
        for length in (1, 8, 9, 31, 32, 33, 64)
        for size in (1, 7, 32, 40)
    ]


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        ("bert", "full"),
        pytest.param("modernbert", "last-1", marks=pytest.mark.slow),
        *(pytest.param(one, "full", marks=pytest.mark.slow) for one in ARCHITECTURES[1:]),
        pytest.param("bert", "head", marks=pytest.mark.slow),
    ],
)
def test_bf16_is_within_its_tolerance(architecture: str, mode: str) -> None:
    report = report_of(architecture, mode, "bf16")
    assert report.failures == ()
    assert all(one.error > 0 for one in report.worst_by_part().values())


class Garbage(TorchFunctionMode):
    """Activations that are NaN."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        return result * math.nan if func is torch.nn.functional.gelu else result


def test_what_is_no_number_fails_everywhere(plant_fault: Any) -> None:
    plant_fault(Garbage())
    report = compare(lively_model())
    assert wrong_parts(report) == set(report.worst_by_part())
    emitted = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(emitted)["differences"][0]["error"] is None
