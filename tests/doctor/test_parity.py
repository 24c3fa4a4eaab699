"""What the comparison finds, shown by faults that are planted under the device's half of it."""

import json
import math
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from planted_faults import IgnoredMask, LeftOutGaps, WrongShortAttention
from tiny_models import ARCHITECTURES, tiny_model
from tiny_training import FewShapesDevice
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from finetune.config.mode import Mode
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.doctor.parity import ParityReport, check_parity, compare
from finetune.doctor.rehearsal import Rehearsal, plan_rehearsal
from finetune.errors import ConfigurationInvalid
from finetune.events import Event
from finetune.training.tolerances import TOLERANCES


def ignore(event: Event) -> None:
    """Let nobody know."""


def parity(
    model: PreTrainedModel,
    *,
    mode: str = "full",
    device: Device | None = None,
    precision: str = "fp32",
) -> ParityReport:
    rehearsal = plan_rehearsal(model, mode=Mode(mode), largest_batch=40)
    return check_parity(rehearsal, device=device or CpuDevice(), precision=precision, emit=ignore)


@cache
def expected_of(*, mode: str) -> tuple[Rehearsal, dict[str, dict[str, torch.Tensor]]]:
    """Return what the CPU is to compute with the lively model, and what it does, once a mode."""
    rehearsal = plan_rehearsal(lively_model(), mode=Mode(mode), largest_batch=40)
    return rehearsal, dict(rehearsal.on(CpuDevice(), precision="fp32"))


@cache
def report_of(
    architecture: str = "bert", mode: str = "full", precision: str = "fp32"
) -> ParityReport:
    """Compare the CPU with itself, once for the same arguments."""
    return parity(tiny_model(architecture), mode=mode, precision=precision)


def lively_model() -> PreTrainedModel:
    """Return a model whose attention makes a difference, unlike that of BERT's first weights."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(9)
    return model


def parity_under(
    fault: AbstractContextManager[Any], *, mode: str = "full", precision: str = "fp32"
) -> ParityReport:
    """Compare the CPU with itself under a fault."""
    rehearsal, expected = expected_of(mode=mode)
    with fault:
        actual = rehearsal.on(CpuDevice(), precision=precision)
        differences = tuple(compare(actual, dict(expected), tolerance=TOLERANCES[precision]))
    return ParityReport("cpu", precision, differences)


def wrong_parts(report: ParityReport) -> set[str]:
    return {one.part for one in report.failures}


def test_the_cpu_computes_what_it_computes() -> None:
    report = report_of()
    assert report.failures == ()
    assert {one.error for one in report.differences} == {0.0}
    assert list(report.worst_by_part()) == [
        "evaluation", "logits", "loss", "gradients", "1 step", "10 steps",
    ]  # fmt: skip


def test_evaluation_has_all_lengths_at_all_batch_sizes() -> None:
    report = report_of()
    evaluated = [one.tensor for one in report.differences if one.part == "evaluation"]
    assert evaluated == [
        f"{size} examples of up to {tokens} tokens"
        for tokens in (1, 8, 9, 31, 32, 33, 64)
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


def test_other_padded_lengths_and_repeated_examples_change_nothing_but_rounding() -> None:
    report = parity(tiny_model(), device=FewShapesDevice())
    assert report.failures == ()
    assert report.worst_by_part()["evaluation"].error > 0


def test_each_parameter_is_compared_in_its_gradient_and_its_changes() -> None:
    model = tiny_model()
    report = parity(model, mode=Mode("head"))
    for part in ("gradients", "1 step", "10 steps"):
        compared = [one.tensor for one in report.differences if one.part == part]
        assert compared == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_planted_fault_of_tensors_with_gaps_is_found_in_the_first_update(precision: str) -> None:
    report = parity_under(LeftOutGaps(), precision=precision)
    assert wrong_parts(report) == {"1 step", "10 steps"}
    worst = report.worst_by_part()["1 step"]
    assert worst.error == pytest.approx(1.0)
    assert worst.tensor.startswith("bert.encoder.layer.2.")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_planted_wrong_mask_is_found_in_the_logits(precision: str) -> None:
    assert {"evaluation", "logits"} <= wrong_parts(parity_under(IgnoredMask(), precision=precision))


def test_planted_fault_of_short_texts_is_found_in_the_evaluation_alone() -> None:
    report = parity_under(WrongShortAttention())
    assert wrong_parts(report) == {"evaluation"}
    assert "7 examples of up to 8 tokens" in [
        one.tensor for one in report.differences if not one.passes
    ]


class Garbage(TorchFunctionMode):
    """Activations that are no numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        return result * math.nan if func is torch.nn.functional.gelu else result


def test_what_is_no_number_fails_everywhere() -> None:
    report = parity_under(Garbage())
    assert wrong_parts(report) == set(report.worst_by_part())
    emitted = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(emitted)["differences"][0]["error"] is None


def test_modules_are_listed_with_a_star_for_the_layer_and_the_worst_of_them() -> None:
    report = report_of("bert", "full", "bf16")
    modules = report.worst_by_module()
    assert "bert.encoder.layer.*.attention.self.key" in modules
    assert not any("layer.0" in module for module in modules)
    key = modules["bert.encoder.layer.*.attention.self.key"]["gradients"]
    assert key.error == max(
        one.error
        for one in report.differences
        if one.part == "gradients" and ".self.key." in one.tensor
    )


def test_more_layers_than_there_are_can_not_train() -> None:
    with pytest.raises(ConfigurationInvalid):
        parity(tiny_model(), mode=Mode("last-9"))
