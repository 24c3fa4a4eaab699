from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, SIZES, tiny_case, tiny_config
from transformers import BertConfig, LongformerConfig

from finetune.batch_finder import estimate as estimate_module
from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.estimate import LiveMemory, estimate, live_peaks, model_live_memory
from finetune.batch_finder.trial_model import build_trial_model
from finetune.config.mode import Mode
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.chips import Mac
from finetune.errors import ModelUnsupportedError

NO_LIMIT = 10**9
KIB = 1024
MIB = 2**20
GIB = 2**30


@pytest.fixture(autouse=True, scope="module")
def take_each_step_once() -> Iterator[None]:
    """Keep what the steps of a case take: it is the same for the same case."""
    known: dict[str, list[int]] = {}

    def peaks_once(case: Case, batch_sizes: Sequence[int]) -> list[int]:
        key = f"{case}{list(batch_sizes)}"
        if key not in known:
            known[key] = live_peaks(case, batch_sizes)
        return known[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(estimate_module, "live_peaks", peaks_once)
        yield


def mac_with(memory_bytes: int) -> Mac:
    """Return a Mac that leaves so much to training."""
    return Mac("Mac", 1024 * GIB, limit_bytes=memory_bytes)


def peaks_of(case: Case, *batch_sizes: int) -> list[int]:
    return estimate_module.live_peaks(case, batch_sizes)


def small_case(architecture: str = "bert", *, layers: int = 2, **changes: Any) -> Case:
    config = tiny_config(architecture).to_dict() | {"num_hidden_layers": layers}
    case = tiny_case(padded_length=64, **changes)
    return replace(case, architecture=architecture_of(config))


@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("full", "whole"),
        pytest.param("last-1", "whole", marks=pytest.mark.slow),
        pytest.param("head", "whole", marks=pytest.mark.slow),
        ("last-1", "features"),
        pytest.param("head", "features", marks=pytest.mark.slow),
        ("head", "trainable"),
    ],
)
def test_fake_steps_take_what_real_ones_do(mode: str, part: Part) -> None:
    case = small_case(layers=3, mode=Mode(mode), part=part)
    with LiveMemory() as memory:
        trial = build_trial_model(case, device=CpuDevice())
        trial.begin()
        real = []
        for batch_size in (4, 32):
            memory.reset_peak()
            trial.take_step(batch_size=batch_size)
            real.append(memory.peak_bytes)
    assert peaks_of(case, 4, 32) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, marks=() if one == "modernbert" else pytest.mark.slow)
        for one in ARCHITECTURES
    ],
)
def test_every_architecture_takes_more_to_train_than_its_head(architecture: str) -> None:
    full, head = (
        peaks_of(small_case(architecture, layers=3, device="mps", mode=Mode(mode)), 64)
        for mode in ("full", "head")
    )
    assert full > head


@pytest.mark.slow
def test_the_model_of_memory_holds_for_sizes_it_was_not_made_from() -> None:
    case = small_case()
    sizes = [1, 7, 3000]
    # The first step at all begins without optimizer state.
    _, *peaks = peaks_of(case, 1, *sizes)
    predicted = [model_live_memory(case).peak_bytes(size) for size in sizes]
    assert predicted == pytest.approx(peaks, rel=0.02)


def test_the_largest_batch_is_the_last_whose_peak_fits() -> None:
    found = estimate(small_case(), mac_with(GIB), limit=NO_LIMIT)
    assert found.peak_bytes
    assert found.peak_bytes <= GIB
    assert found.recommended < found.largest < found.highest
    one_byte_less = estimate(small_case(), mac_with(found.peak_bytes - 1), limit=NO_LIMIT)
    assert one_byte_less.largest == found.largest - 1


def test_a_model_whose_operations_depend_on_numbers_can_not_be_estimated() -> None:
    longformer = LongformerConfig(**SIZES, attention_window=8).to_dict()
    case = replace(small_case(), architecture=architecture_of(longformer))
    with pytest.raises(ModelUnsupportedError, match="longformer can't be estimated"):
        estimate(case, mac_with(GIB), limit=NO_LIMIT)


def test_an_estimate_for_macs_says_that_it_was_never_measured() -> None:
    found = estimate(small_case(device="mps"), mac_with(4 * GIB), limit=NO_LIMIT)
    assert "not on measurements of this project" in str(found.basis)


def test_checkpointing_keeps_less_alive() -> None:
    [plain] = peaks_of(small_case(), 64)
    [checkpointed] = peaks_of(small_case(gradient_checkpointing=True), 64)
    assert checkpointed < 0.6 * plain


def test_a_layer_that_never_trains_takes_less_than_one_that_does() -> None:
    [trained], [constant] = (
        peaks_of(small_case(layers=4, has_mean_layer=is_constant), 64)
        for is_constant in (False, True)
    )
    assert constant < trained


def test_what_the_backward_pass_needs_stays_alive_until_then() -> None:
    with LiveMemory() as memory:
        weight = torch.ones(256, requires_grad=True)
        loss = (weight * weight.detach().exp()).sum()
        kept_bytes = memory.live_bytes
        loss.backward()
        assert kept_bytes == 2 * KIB + 4
        # Weight, gradient and loss: the factor that the graph kept is gone.
        assert memory.live_bytes == 2 * KIB + 4


def test_the_origin_and_the_classes_do_not_change_an_architecture() -> None:
    one = BertConfig(num_labels=2, name_or_path="here").to_dict()
    other = BertConfig(num_labels=50, name_or_path="there", architectures=["BertModel"]).to_dict()
    assert architecture_of(one) == architecture_of(other)
    assert architecture_of(one) != architecture_of(BertConfig(hidden_size=96).to_dict())
