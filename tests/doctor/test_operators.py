from functools import cache

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_case, tiny_model
from torch import nn

from finetune.config.schema import Mode
from finetune.doctor.models import Operator, OperatorReport, audit_classifier, audit_module
from finetune.errors import UsageError
from finetune.model.load import loss_of

# fp16 dispatches the same operators as bf16.
COMBINATIONS = [
    (one, mode, precision)
    for one in ARCHITECTURES
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


@pytest.fixture
def bert_report() -> OperatorReport:
    """The report for all layers of a tiny BERT."""
    return report_of()


def by_name(report: OperatorReport) -> dict[str, Operator]:
    return {one.name: one for one in report.operators}


def messages(report: OperatorReport) -> str:
    return "\n".join(one.message for one in report.warnings)


@pytest.mark.parametrize(
    ("architecture", "mode", "precision"),
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in COMBINATIONS],
)
def test_no_encoder_needs_what_mps_lacks(architecture: str, mode: str, precision: str) -> None:
    report = report_of(architecture, mode, precision)
    assert report.missing == ()
    assert report.warnings == ()


def test_calls_are_those_of_one_step_and_modules_those_that_call(
    bert_report: OperatorReport,
) -> None:
    found = by_name(bert_report)
    # Six per layer, the pooler and the classifier.
    assert found["aten::addmm"].calls == 3 * 6 + 2
    assert "bert.encoder.layer.*.intermediate.dense" in found["aten::addmm"].modules
    for name, modules in {
        "gelu": ("bert.encoder.layer.*.intermediate.intermediate_act_fn",),
        "gelu_backward": ("GeluBackward0",),
        "nll_loss_forward": ("loss",),
        "_fused_adamw_": ("optimizer",),
        "linalg_vector_norm": ("clipping",),
    }.items():
        assert found[f"aten::{name}"].modules == modules
    assert "aten::embedding_dense_backward" not in by_name(report_of(mode="head"))


class Plain(nn.Module):
    """A layer, followed by any function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(inputs))  # type: ignore[operator,no-any-return]


BATCH = {"inputs": torch.ones(2, 3)}


def test_planted_operator_that_mps_lacks_is_named_with_its_module() -> None:
    report = audit_module(nn.Sequential(MostFrequent()), {"input": torch.ones(2, 3)})
    assert [(one.name, one.modules) for one in report.missing] == [("aten::mode", ("*",))]
    assert "MPS has no aten::mode, which * calls" in messages(report)
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in report.warnings[0].remedy


class MostFrequent(nn.Module):
    """An activation function that MPS lacks."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., None].mode().values


def test_planted_float64_is_named_with_its_module() -> None:
    report = audit_module(Plain(lambda rows: rows.double().sum()), BATCH)
    assert "Plain passes float64 to aten::_to_copy, which MPS doesn't support" in messages(report)


def test_a_module_whose_output_has_no_number_to_go_backward_from_is_a_wrong_use() -> None:
    with pytest.raises(UsageError, match="has no loss"):
        loss_of({"labels": torch.tensor([1]), "name": "none"})
