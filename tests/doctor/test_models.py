"""``doctor --ops`` and ``doctor --parity``."""

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from planted_faults import Fault, plant
from tiny_models import ARCHITECTURES, tiny_case, tiny_model

from finetune.batch_finder.trial_model import TrialModel
from finetune.config.modes import Mode
from finetune.devices.cpu import CpuDevice
from finetune.doctor import models
from finetune.doctor.models import OperatorReport, ParityReport, audit_classifier, compare_model
from finetune.errors import UsageError
from finetune.model.load import loss_of

# fp16 dispatches the same operators as bf16.
COMBINATIONS = [
    (architecture, mode, precision)
    for architecture in ARCHITECTURES
    for mode in ("full", "last-1", "head", "classifier")
    for precision in ("fp32", "fp16")
]
QUICK = {
    ("bert", "head", "fp32"),
    ("electra", "classifier", "fp16"),
    ("deberta-v2", "full", "fp32"),
}


@cache
def report_of(
    architecture: str = "bert", mode: str = "full", precision: str = "fp32"
) -> OperatorReport:
    """Audit a tiny model, and cache the result."""
    case = tiny_case(architecture, mode=Mode(mode), precision=precision)
    return audit_classifier(tiny_model(architecture), case, batch_size=4)


@pytest.mark.parametrize(
    ("architecture", "mode", "precision"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in COMBINATIONS],
)
def test_encoders_use_only_operators_that_mps_supports(
    architecture: str, mode: str, precision: str
) -> None:
    report = report_of(architecture, mode, precision)
    assert report.missing == ()
    assert report.warnings == ()


def test_module_output_without_a_loss_is_rejected() -> None:
    with pytest.raises(UsageError, match="has no loss"):
        loss_of({"labels": torch.tensor([1]), "name": "none"})


def compare(
    architecture: str = "bert", *, mode: str = "full", precision: str = "fp32"
) -> ParityReport:
    """Compare the CPU with itself."""
    return compare_model(
        tiny_model(architecture),
        CpuDevice(),
        mode=Mode(mode),
        precision=precision,
        max_batch_size=40,
    )


def test_cpu_agrees_with_itself() -> None:
    report = compare()
    assert {each.error for each in report.differences if each.part != "changes"} == {0.0}
    assert max(difference.error for difference in report.differences) < 1e-5
    assert list(report.worst_by_part()) == ["logits", "gradients", "changes"]
    evaluated = [
        difference.tensor for difference in report.differences if difference.part == "logits"
    ]
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
        *(pytest.param(name, "full", marks=pytest.mark.slow) for name in ARCHITECTURES[1:]),
        pytest.param("bert", "head", marks=pytest.mark.slow),
    ],
)
def test_bf16_differences_are_within_the_tolerance(architecture: str, mode: str) -> None:
    report = compare(architecture, mode=mode, precision="bf16")
    assert report.failures == ()
    assert all(difference.error > 0 for difference in report.worst_by_part().values())


def test_nan_fails_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, gelu = models.prepare_trial_model, torch.nn.functional.gelu

    def prepare_with_fault(*arguments: Any, **options: Any) -> TrialModel:
        trial = prepare(*arguments, **options)
        plant(trial.trainer, Fault(gelu, lambda *inputs: gelu(*inputs) * math.nan))
        return trial

    monkeypatch.setattr(models, "prepare_trial_model", prepare_with_fault)
    report = compare()
    assert {failure.part for failure in report.failures} == {"logits", "gradients", "changes"}
    emitted = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(emitted)["differences"][0]["error"] is None
