from collections.abc import Callable

import pytest
import torch
from machines import INTEL_MAC, ROSETTA, VIRTUAL_MAC_TEXTS, pretend

from finetune.devices.base import Unusable
from finetune.devices.mps.device import MpsDevice
from finetune.distributed.processes import Processes
from finetune.errors import UsageError


@pytest.fixture
def device(pretend_mac: Callable[..., None]) -> MpsDevice:
    pretend_mac()
    return MpsDevice()


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


def explain() -> Unusable:
    unusable = MpsDevice.why_not_usable()
    assert unusable is not None
    return unusable


@pytest.mark.parametrize("macos", ["14.0", "14.5", "15.6.1", "26.0"])
def test_apple_silicon_with_a_recent_macos_is_usable(
    pretend_mac: Callable[..., None], macos: str
) -> None:
    pretend_mac(macos=macos)
    assert MpsDevice.why_not_usable() is None


def test_another_system_than_macos_is_the_reason(pretend_linux: None) -> None:
    assert explain() == Unusable(
        "MPS needs a Mac, and this is Linux", remedy="use --device cpu", is_absent=True
    )


def test_an_intel_mac_is_sent_to_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(INTEL_MAC, monkeypatch)
    assert "Intel CPU" in explain().reason
    assert explain().remedy == "use --device cpu"


def test_a_python_for_intel_on_apple_silicon_is_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(ROSETTA, monkeypatch)
    assert "under Rosetta" in explain().reason
    assert "CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11" in explain().remedy


@pytest.mark.parametrize("macos", ["12.3", "13.6"])
def test_an_old_macos_is_to_be_updated(pretend_mac: Callable[..., None], macos: str) -> None:
    pretend_mac(macos=macos, is_mps_available=False)
    assert explain().reason == f"MPS needs macOS 14 or newer, and this is {macos}"
    assert "update macOS" in explain().remedy


@pytest.mark.parametrize("text", VIRTUAL_MAC_TEXTS)
def test_a_virtual_mac_is_found_out_by_trying(pretend_mac: Callable[..., None], text: str) -> None:
    pretend_mac(failure=text)
    assert text in explain().reason
    assert explain().remedy.startswith("use --device cpu; the GPU of a virtual Mac can't be used")


def test_a_failure_that_nobody_knows_is_told_with_its_text(
    pretend_mac: Callable[..., None],
) -> None:
    pretend_mac(failure="Internal Error (0000000e:Internal Error)")
    assert "0000000e" in explain().reason
    assert "github.com/pytorch/pytorch/issues" in explain().remedy
