import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import SIZES, tiny_case, tiny_config
from torch.nn import functional
from transformers import BertConfig, DistilBertConfig, LongformerConfig, PreTrainedConfig

from finetune.batch_finder.estimate import LiveMemory, allocated_peaks, estimate
from finetune.batch_finder.results import Case, Part, architecture_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.config.modes import Mode
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.facts import Mac, find_mac
from finetune.devices.private import FakeTensorMode, keeping_memory_as
from finetune.errors import ModelUnsupportedError

NO_LIMIT = 10**9
GIB = 2**30


def mac_with(memory_bytes: int) -> Mac:
    """Return a Mac with this much memory for training."""
    return Mac("Mac", 1024 * GIB, chip="m4", limit_bytes=memory_bytes)


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
def test_fake_steps_use_as_much_memory_as_real_steps(mode: str, part: Part) -> None:
    case = small_case(layers=3, mode=Mode(mode), part=part)
    with LiveMemory() as memory:
        trial = build_trial_model(case, device=CpuDevice())
        trial.begin()
        real = []
        for batch_size in (4, 32):
            memory.reset_peak()
            trial.take_step(batch_size=batch_size)
            real.append(memory.peak_bytes)
    assert allocated_peaks(case, [4, 32]) == pytest.approx(real, rel=0.02)


def test_estimate_returns_the_largest_batch_whose_peak_fits() -> None:
    result = estimate(small_case(), mac_with(GIB), limit=NO_LIMIT)
    assert result.peak_bytes
    assert result.peak_bytes <= GIB
    assert result.recommended < result.largest < result.highest
    one_byte_less = estimate(small_case(), mac_with(result.peak_bytes - 1), limit=NO_LIMIT)
    assert one_byte_less.largest == result.largest - 1


def test_model_with_data_dependent_operations_is_rejected() -> None:
    longformer = LongformerConfig(**SIZES, attention_window=8).to_dict()
    case = replace(small_case(), architecture=architecture_of(longformer))
    with pytest.raises(ModelUnsupportedError, match="longformer can't be estimated"):
        estimate(case, mac_with(GIB), limit=NO_LIMIT)


DISTILBERT, BERT = DistilBertConfig(), BertConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mac", "config", "mode", "tokens", "ran", "failed", "at_full_speed", "slower"),
    [
        # mrdbourke/mac-ml-speed-test, 2023. On M1 and M2, more than 32,766 tokens fail too.
        ("m3-8gb", DISTILBERT, "last-1", 512, 16, 32, 16, 32),
        ("m3-pro-18gb", DISTILBERT, "last-1", 512, 128, 256, 128, 256),
        ("m1-pro-32gb", DISTILBERT, "last-1", 512, 63, 64, 64, 128),
        ("m3-max-36gb", DISTILBERT, "last-1", 512, 256, 512, 128, 256),
        # lucadiliello/pytorch-apple-silicon-benchmarks, 2022-2023.
        ("m1-max-32gb", BERT, "full", 128, 64, 256, 64, 256),
        ("m1-max-32gb", BERT, "full", 512, 0, 16, 16, 16),  # 16 swapped, fewer were not tried
        # jamescalam/pytorch-mps, 2022.
        ("m1-8gb", BERT, "full", 512, 1, 2, 1, 2),
        ("m1-8gb", BERT, "classifier", 512, 63, 64, 64, 128),
    ],
)
def test_estimates_agree_with_published_mac_runs(
    mac: str, config: PreTrainedConfig, mode: str, tokens: int, ran: int, failed: int,
    at_full_speed: int, slower: int,
) -> None:  # fmt: skip
    case = Case("mps", architecture_of(config.to_dict()), 2, Mode(mode), padded_length=tokens)
    result = estimate(case, find_mac(mac), limit=NO_LIMIT)
    assert result.highest
    assert result.highest >= ran
    assert result.recommended < failed
    assert result.recommended <= math.sqrt(at_full_speed * slower)
    # The center of the range is at most 10% outside of the limits.
    assert 0.9 * ran - 1 < result.largest < 1.11 * failed


def test_attention_weights_are_kept_only_on_mps() -> None:
    def kept_bytes(device: str, tokens: int) -> int:
        with FakeTensorMode(), LiveMemory() as memory, keeping_memory_as(device):
            tensor = torch.ones(2, 4, tokens, 8, requires_grad=True)
            result = functional.scaled_dot_product_attention(tensor, tensor, tensor)
            assert result.requires_grad
            return memory.live_bytes

    assert kept_bytes("mps", 512) > 12 * kept_bytes("mps", 128)
    assert kept_bytes("cpu", 512) < 5 * kept_bytes("cpu", 128)
