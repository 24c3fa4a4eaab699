"""Steps are timed by a planted clock, which each product moves on, in bf16 by other seconds."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tiny_runs import have_same_bits
from tiny_training import CLASSES, copied_parameters, random_examples

from finetune.config.mode import Mode
from finetune.devices.batch_size import BatchSize
from finetune.devices.cpu import CpuDevice
from finetune.events import ignore
from finetune.model.freeze import freeze_parameters
from finetune.model.structure import find_structure
from finetune.tasks.single import cross_entropy
from finetune.tokenization.buckets import Batch
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.precision_result import PrecisionTiming
from finetune.training.precision_timing import time_precisions
from finetune.training.schedule import Schedule
from finetune.training.training_state import Hyperparameters

HYPERPARAMETERS = Hyperparameters(
    optimizer="adamw", schedule=Schedule(peak=1e-3, warmup_steps=0, total_steps=100),
    head_lr_multiplier=1.0, weight_decay=0.01, max_grad_norm=1.0,
)  # fmt: skip


class Planted:
    """A processor whose products take other seconds in bf16, and have other results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bf16_seconds, self.bf16_factor = 1.0, 1.0
        self.now, self.batches = 0.0, 0
        self._linear = torch.nn.functional.linear
        monkeypatch.setattr(torch.nn.functional, "linear", self.multiply)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("finetune.training.precision_timing.time", clock)

    def multiply(self, *arguments: Any) -> torch.Tensor:
        is_bf16 = torch.is_autocast_enabled("cpu")
        self.now += self.bf16_seconds if is_bf16 else 1.0
        return self._linear(*arguments) * (self.bf16_factor if is_bf16 else 1.0)

    def time(self, model: Any = None, *, mode: str = "full") -> PrecisionTiming:
        model = model or tiny_model(classes=CLASSES)
        structure = find_structure(model)
        freeze_parameters(model, structure, mode=Mode(mode))
        examples, device = random_examples(8), CpuDevice()
        self.batches = 0

        def cut(batch_size: int) -> Iterator[MicroBatch]:
            self.batches += 1
            batch = Batch(np.arange(4), padded_length=16)
            return cut_batch(examples, batch, batch_size=batch_size, device=device)

        return time_precisions(
            model, head=structure.head, losses=cross_entropy,
            hyperparameters=HYPERPARAMETERS, cut=cut,
            batch_size=BatchSize(8, "batch size", device, ignore),
        )  # fmt: skip


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(monkeypatch)


@pytest.mark.parametrize("mode", ["full", "head"])
def test_bf16_is_chosen_where_it_is_clearly_faster(planted: Planted, mode: str) -> None:
    planted.bf16_seconds = 0.5
    timing = planted.time(mode=mode)
    assert timing.precision == "bf16"
    assert timing.seconds["bf16"] == pytest.approx(timing.seconds["fp32"] / 2)
    # A round to warm up, two that are clear, and the comparison of the logits.
    assert planted.batches == 2 * 3 + 1
    assert timing.logits_error is not None
    assert 0 < timing.logits_error < 0.05


def test_fp32_is_kept_where_bf16_gains_less_than_noise(planted: Planted) -> None:
    planted.bf16_seconds = 0.98
    assert planted.time().precision == "fp32"
    assert planted.batches == 2 * 6


def test_one_update_that_is_much_slower_in_bf16_ends_the_timing(planted: Planted) -> None:
    planted.bf16_seconds = 3.0
    timing = planted.time()
    assert (timing.work, timing.precision, planted.batches) == ("step", "fp32", 2)


def test_a_hopeless_product_spares_the_updates(planted: Planted) -> None:
    planted.bf16_seconds = 5.0
    timing = planted.time()
    assert (timing.work, timing.precision, planted.batches) == ("product", "fp32", 0)
    assert str(timing) == "one product takes 1,000.0 ms in fp32 and 5,000.0 ms in bf16"


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_other_results_in_bf16_outweigh_its_speed(planted: Planted, factor: float) -> None:
    planted.bf16_seconds, planted.bf16_factor = 0.5, factor
    timing = planted.time()
    assert timing.is_bf16_faster
    assert not timing.do_results_agree
    assert timing.precision == "fp32"


def test_a_timing_leaves_model_and_random_numbers_as_they_were(planted: Planted) -> None:
    model = tiny_model(classes=CLASSES).train(False)
    before, forward, random_state = copied_parameters(model), model.forward, torch.get_rng_state()
    planted.time(model)
    assert have_same_bits(copied_parameters(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert model.forward == forward
