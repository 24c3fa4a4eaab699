import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn
from transformers import PreTrainedModel

from finetune.doctor.operators import (
    Operator,
    OperatorReport,
    audit_classifier,
    audit_module,
    load_factory,
)
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.model.mode import Mode
from finetune.model.structure import find_structure

MODES = ("full", "last-1", "head", "classifier")
PRECISIONS = ("fp32", "bf16", "fp16")


def audit(
    model: PreTrainedModel,
    *,
    mode: str = "full",
    precision: str = "fp32",
    rows: int = 4,
    padded_length: int = 16,
    torch_version: str = "2.13.0",
    computes: bool = False,
) -> OperatorReport:
    return audit_classifier(
        model,
        find_structure(model),
        mode=Mode(mode),
        precision=precision,
        rows=rows,
        padded_length=padded_length,
        torch_version=torch_version,
        computes=computes,
    )


def by_name(report: OperatorReport) -> dict[str, Operator]:
    return {one.name: one for one in report.operators}


def messages(report: OperatorReport) -> str:
    return "\n".join(one.message for one in report.warnings)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_encoder_needs_what_mps_lacks_in_any_mode(architecture: str, precision: str) -> None:
    model = tiny_model(architecture)
    for mode in MODES:
        report = audit(model, mode=Mode(mode), precision=precision)
        assert report.missing == ()
        assert report.warnings == ()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_lost_by_not_computing(architecture: str, precision: str) -> None:
    model = tiny_model(architecture)
    computed = audit(model, precision=precision, computes=True)
    # A list of gradients at once: the processor's way to clip, and not that of MPS.
    only_there = {"aten::_foreach_norm.Scalar", "aten::_foreach_mul_.Tensor"}
    expected = [one for one in computed.operators if one.name not in only_there]
    assert list(audit(model, precision=precision).operators) == expected


def test_calls_are_those_of_one_update_and_modules_those_that_call() -> None:
    operators = by_name(audit(tiny_model()))
    # Six a layer, the pooler and the classifier.
    assert operators["aten::linear"].calls == 3 * 6 + 2
    assert operators["aten::linear_backward"].calls == 3 * 6 + 2
    assert "bert.encoder.layer.*.intermediate.dense" in operators["aten::linear"].modules
    assert operators["aten::gelu"].modules == operators["aten::gelu_backward"].modules
    assert operators["aten::gelu_backward"].modules == (
        "bert.encoder.layer.*.intermediate.intermediate_act_fn",
    )
    assert operators["aten::nll_loss_forward"].modules == ("loss",)
    assert operators["aten::_fused_adamw_"].modules == ("optimizer",)
    assert operators["aten::linalg_vector_norm"].modules == ("clipping",)


def test_attention_of_the_evaluation_is_what_mps_runs_there() -> None:
    operator = by_name(audit(tiny_model()))["aten::_scaled_dot_product_attention_math_for_mps"]
    assert (operator.calls, operator.status) == (0, "native")


def test_a_frozen_core_attends_as_in_the_evaluation() -> None:
    operators = by_name(audit(tiny_model(), mode=Mode("head")))
    assert operators["aten::_scaled_dot_product_attention_math_for_mps"].calls == 3
    assert "aten::embedding_dense_backward" not in operators


def test_fp16_shows_the_scaling_of_gradients() -> None:
    model = tiny_model()
    only_fp16 = by_name(audit(model, precision="fp16")).keys() - by_name(audit(model)).keys()
    assert {
        "aten::_amp_foreach_non_finite_check_and_unscale_",
        "aten::_amp_update_scale_",
    } <= only_fp16


def test_parts_of_a_composite_are_listed_too() -> None:
    operators = by_name(audit(tiny_model()))
    assert operators["aten::embedding"].status == "composite"
    assert operators["aten::index_select"].modules == operators["aten::embedding"].modules


@pytest.mark.parametrize("computes", [True, False])
def test_the_model_is_left_as_it_was(computes: bool) -> None:
    model = tiny_model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    audit(model, mode=Mode("classifier"), computes=computes)
    assert all(one.requires_grad and one.grad is None for one in model.parameters())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_more_layers_than_there_are_can_not_train() -> None:
    with pytest.raises(ConfigurationInvalid):
        audit(tiny_model(), mode=Mode("last-9"))


def test_a_large_batch_is_audited_without_computing_it() -> None:
    report = audit(tiny_model(), rows=1024, padded_length=64)
    assert "aten::linear_backward on MPS gives wrong gradients" in messages(report)
    assert "pytorch#177116" in messages(report)


def test_fp16_needs_a_pytorch_that_skips_infinite_gradients() -> None:
    report = audit(tiny_model(), precision="fp16", torch_version="2.12.0")
    assert "in PyTorch 2.12.0, aten::_fused_adamw_ on MPS" in messages(report)
    assert audit(tiny_model(), torch_version="2.12.0").warnings == ()


def test_a_norm_on_top_of_a_frozen_core_needs_a_pytorch_that_trains_it() -> None:
    model = tiny_model("modernbert")
    report = audit(model, mode=Mode("last-1"), torch_version="2.12.0")
    assert "pytorch#183825" in messages(report)
    assert audit(model, mode=Mode("full"), torch_version="2.12.0").warnings == ()


class Plain(nn.Module):
    """A layer, followed by whatever a test gives it."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(inputs))  # type: ignore[operator,no-any-return]


BATCH = {"inputs": torch.ones(2, 3)}


def test_planted_operator_that_mps_lacks_is_named_with_its_module() -> None:
    report = audit_module(nn.Sequential(Take()), {"input": torch.ones(2, 3)})
    assert [(one.name, one.modules) for one in report.missing] == [("aten::take", ("*",))]
    assert "MPS has no aten::take, which * calls" in messages(report)
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in report.warnings[0].remedy


def test_planted_operator_is_found_inside_a_composite() -> None:
    # pinv is made of others, among them a singular value decomposition.
    report = audit_module(Plain(torch.linalg.pinv), BATCH)
    assert "aten::_linalg_svd" in [one.name for one in report.missing]


def test_planted_operator_is_found_in_the_backward_alone() -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):  # type: ignore[no-untyped-def]
            return rows.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * gradient.heaviside(gradient)

    report = audit_module(Plain(Function.apply), BATCH)
    assert [(one.name, one.modules) for one in report.missing] == [("aten::heaviside", ("Plain",))]


def test_planted_operator_of_a_classifier_is_found() -> None:
    model = tiny_model()
    model.bert.pooler.activation = Take()
    for mode in ("full", "classifier"):
        missing = {one.name: one.modules for one in audit(model, mode=Mode(mode)).missing}
        assert missing["aten::take"] == ("bert.pooler.activation",)
        # Its backward.
        assert ("aten::put_" in missing) is (mode == "full")


class Take(nn.Module):
    """An activation that MPS lacks."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.take(torch.arange(rows.numel())).view(rows.shape)


def test_planted_float64_is_named_with_its_module() -> None:
    report = audit_module(Plain(lambda rows: rows.double().sum()), BATCH)
    assert "Plain gives float64 to aten::_to_copy, and MPS can't hold float64" in messages(report)


def test_planted_wrong_operator_is_named_with_its_report() -> None:
    def add_into_gaps(rows: torch.Tensor) -> torch.Tensor:
        return rows.sum() + torch.zeros(3, 2).T.addcmul_(torch.ones(2, 3), torch.ones(2, 3)).sum()

    report = audit_module(Plain(add_into_gaps), BATCH, torch_version="2.3.1")
    assert "in PyTorch 2.3.1, aten::addcmul_ on MPS" in messages(report)
    assert "pytorch#118115" in messages(report)
    assert audit_module(Plain(add_into_gaps), BATCH).warnings == ()


def test_report_is_json_of_the_promised_form() -> None:
    report = audit_module(Plain(lambda rows: rows.double()), BATCH)
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded.keys() == {"schema_version", "operators", "warnings"}
    assert loaded["schema_version"] == 1
    assert all(one.keys() == {"name", "status", "calls", "modules"} for one in loaded["operators"])
    assert all(one.keys() == {"message", "remedy"} for one in loaded["warnings"])


def test_loss_of_the_module_is_what_goes_backward() -> None:
    class Output(dict):  # type: ignore[type-arg]
        loss = torch.ones((), requires_grad=True).cos()

    operators = by_name(audit_module(Plain(lambda _: Output()), BATCH))
    assert "aten::linear_backward" not in operators
    assert "aten::linear" in operators


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_factories.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Linear(3, 4), {'input': torch.ones(2, 3)}\n"
        "def make_other(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_factories", raising=False)


@pytest.mark.usefixtures("factories")
def test_factory_is_called_for_its_module_and_batch() -> None:
    module, batch = load_factory("own_factories:make")
    assert audit_module(module, batch).missing == ()


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    "name", ["own_factories:none", "own_factories", "no_such:make", "own_factories:make_other"]
)
def test_no_factory_is_a_wrong_use(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        load_factory(name)
