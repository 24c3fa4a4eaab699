from collections.abc import Callable
from functools import partial

import pytest
import torch

from finetune.devices.mps.device import MpsDevice
from finetune.distributed.processes import Processes
from finetune.errors import UsageError


@pytest.fixture
def device(pretend_mac: Callable[..., None]) -> MpsDevice:
    pretend_mac()
    return MpsDevice()


def test_it_describes_the_chip_and_the_shared_memory(device: MpsDevice) -> None:
    assert device.description == "Apple M2 GPU, 16.0 GiB unified memory"


def test_it_takes_one_process(device: MpsDevice) -> None:
    assert Processes().on(device).count == 1
    with pytest.raises(UsageError, match="a Mac's GPU is one device"):
        Processes(0, 2).on(device)


@pytest.mark.parametrize(
    ("chip", "version", "precisions"),
    [
        ("Apple M4", "2.12.1", ("fp32", "bf16")),
        ("Apple M5 Pro", "2.12.1", ("fp32",)),
        ("Apple M5", "2.13.0", ("fp32", "bf16", "fp16")),
        ("Apple M1", "2.14.0.dev20261001", ("fp32", "bf16", "fp16")),
    ],
)
def test_precisions_are_those_in_which_pytorch_computes_right(
    pretend_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    chip: str,
    version: str,
    precisions: tuple[str, ...],
) -> None:
    pretend_mac(chip=chip)
    monkeypatch.setattr(torch, "__version__", version)
    assert MpsDevice().precisions == precisions


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1"])
@pytest.mark.parametrize(("chip", "tokens"), [("Apple M2", 32_766), ("Apple M3 Max", None)])
def test_the_articles_batch_is_one_example_too_large_for_m1_and_m2(
    pretend_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    chip: str,
    tokens: int | None,
) -> None:
    pretend_mac(chip=chip)
    monkeypatch.setattr(torch, "__version__", version)
    assert MpsDevice().shapes.max_tokens == tokens


def test_another_macs_chip_may_be_asked_for(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(chip="Apple M4")
    assert MpsDevice(chip="m1").shapes.max_examples(padded_length=512) == 63
    assert MpsDevice(chip="m3").shapes.max_examples(padded_length=512) is None


@pytest.mark.parametrize(
    ("chip", "macos", "version", "examples"),
    [
        ("Apple M1 Pro", "26.1", "2.13.0", 2),
        ("Apple M1 Pro", "26.1", "2.14.0", 1),
        ("Apple M1 Pro", "15.6", "2.13.0", 1),
        ("Apple M1 Pro", "27.0", "2.13.0", 1),
        ("Apple M2", "26.1", "2.13.0", 1),
    ],
)
def test_an_m1_with_macos_26_needs_two_examples_for_a_bias(
    pretend_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    chip: str,
    macos: str,
    version: str,
    examples: int,
) -> None:
    pretend_mac(chip=chip, macos=macos)
    monkeypatch.setattr(torch, "__version__", version)
    assert MpsDevice().shapes.min_examples == examples


def test_it_wants_every_batch_to_have_all_examples(device: MpsDevice) -> None:
    assert device.shapes.pads_batches


def test_it_has_six_shapes_of_more_queries_than_attention_needs_to_be_right(
    device: MpsDevice,
) -> None:
    assert device.shapes.max_shapes == 6
    assert [device.shapes.padded_length(tokens) for tokens in (1, 8, 9, 41)] == [9, 9, 9, 41]


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
