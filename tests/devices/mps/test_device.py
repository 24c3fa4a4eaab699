from collections.abc import Callable
from functools import partial

import pytest
import torch

from finetune.devices.mps.device import MpsDevice


@pytest.fixture
def device(pretend_mac: Callable[..., None]) -> MpsDevice:
    pretend_mac()
    return MpsDevice()


def test_it_describes_the_chip_and_the_shared_memory(device: MpsDevice) -> None:
    assert device.description == "Apple M2 GPU, 16.0 GiB unified memory"


@pytest.mark.parametrize(
    ("version", "precisions"),
    [
        ("2.11.0", ("fp32", "bf16")),
        ("2.12.1", ("fp32", "bf16")),
        ("2.13.0", ("fp32", "bf16", "fp16")),
        ("2.14.0.dev20261001", ("fp32", "bf16", "fp16")),
    ],
)
def test_fp16_needs_a_pytorch_whose_optimizer_skips_infinite_gradients(
    pretend_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    precisions: tuple[str, ...],
) -> None:
    pretend_mac()
    monkeypatch.setattr(torch, "__version__", version)
    assert MpsDevice().precisions == precisions


@pytest.mark.parametrize(("version", "max_tokens"), [("2.13.0", 32_766), ("2.14.1", None)])
def test_the_articles_batch_is_one_row_too_large_before_pytorch_2_14(
    pretend_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    max_tokens: int | None,
) -> None:
    pretend_mac()
    monkeypatch.setattr(torch, "__version__", version)
    assert MpsDevice().shapes.max_tokens == max_tokens


def test_it_wants_every_batch_to_have_all_rows(device: MpsDevice) -> None:
    assert device.shapes.pads_batches


@pytest.mark.parametrize(
    ("longest_tokens", "padded_lengths"),
    [
        (1, [16]),
        (16, [16]),
        (17, [16, 24]),
        (41, [16, 24, 48]),
        (128, [32, 64, 128]),
        (512, [128, 256, 512]),
    ],
)
def test_padded_lengths_are_the_longest_length_and_its_halves(
    device: MpsDevice, longest_tokens: int, padded_lengths: list[int]
) -> None:
    assert device.shapes.padded_lengths(longest_tokens) == padded_lengths


def test_padded_lengths_are_few_ascend_and_hold_the_longest_text(device: MpsDevice) -> None:
    for longest_tokens in range(1, 1025):
        padded_lengths = device.shapes.padded_lengths(longest_tokens)
        assert 1 <= len(padded_lengths) <= 3
        assert list(padded_lengths) == sorted(set(padded_lengths))
        assert all(
            padded_length >= 16 and padded_length % 8 == 0 for padded_length in padded_lengths
        )
        assert longest_tokens <= padded_lengths[-1] < max(17, longest_tokens + 8)


def test_no_text_above_a_quarter_of_the_longest_is_padded_beyond_twice_its_length(
    device: MpsDevice,
) -> None:
    for longest_tokens in range(9, 513):
        padded_lengths = device.shapes.padded_lengths(longest_tokens)
        for tokens in range(max(9, longest_tokens // 4 + 1), longest_tokens + 1):
            assert (
                next(padded_length for padded_length in padded_lengths if padded_length >= tokens)
                < 2 * tokens + 8
            )


def test_memory_is_that_of_live_tensors(device: MpsDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 1_200)
    monkeypatch.setattr(torch.accelerator, "memory_stats", dict)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5_000)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    device.memory.reset_peak()
    assert (device.memory.used_bytes(), device.memory.peak_bytes()) == (1_200, 5_000)


def test_running_out_of_memory_is_known_by_its_text(device: MpsDevice) -> None:
    assert device.memory.is_out_of_memory(RuntimeError("Invalid buffer size: 12.34 GB"))
    assert not device.memory.is_out_of_memory(
        RuntimeError("Input type (float) and bias type (c10::Half)")
    )


def test_it_waits_and_releases_through_metal(
    device: MpsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.mps, name, partial(calls.append, name))
    device.synchronize()
    device.memory.release()
    assert calls == ["synchronize", "empty_cache"]


@pytest.mark.mps
def test_memory_is_counted_released_and_refused_on_a_real_gpu() -> None:
    device = MpsDevice()
    device.memory.reset_peak()
    before_bytes = device.memory.used_bytes()
    filled = torch.ones(64, 2**20, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    assert device.memory.used_bytes() - before_bytes >= filled.nbytes
    del filled
    device.memory.release()
    assert device.memory.used_bytes() == before_bytes
    peak_bytes = device.memory.peak_bytes()
    assert peak_bytes is None or peak_bytes >= before_bytes + 64 * 2**20
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46, device=device.torch_device)
    assert device.memory.is_out_of_memory(caught.value)
