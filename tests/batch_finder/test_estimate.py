from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import SIZES, tiny_case, tiny_config
from transformers import LongformerConfig

from finetune.batch_finder import estimate as estimate_module
from finetune.batch_finder.estimate import LiveMemory, allocated_peaks, estimate
from finetune.batch_finder.results import Case, Part, architecture_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.config.mode import Mode
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.chips import Mac
from finetune.errors import ModelUnsupportedError

NO_LIMIT = 10**9
GIB = 2**30


@pytest.fixture(autouse=True, scope="module")
def take_each_step_once() -> Iterator[None]:
    """Keep what the steps of a case take: it is the same for the same case."""
    known: dict[str, list[int]] = {}

    def peaks_once(case: Case, batch_sizes: Sequence[int]) -> list[int]:
        key = f"{case}{list(batch_sizes)}"
        if key not in known:
            known[key] = allocated_peaks(case, batch_sizes)
        return known[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(estimate_module, "allocated_peaks", peaks_once)
        yield


def mac_with(memory_bytes: int) -> Mac:
    """Return a Mac that leaves so much to training."""
    return Mac("Mac", 1024 * GIB, limit_bytes=memory_bytes)


def peaks_of(case: Case, *batch_sizes: int) -> list[int]:
    return estimate_module.allocated_peaks(case, batch_sizes)


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
