from collections.abc import Callable

import pytest
from machines import INTEL_MAC, ROSETTA, VIRTUAL_MAC_TEXTS, pretend

from finetune.devices.base import Unusable
from finetune.devices.mps.support import why_not_usable


def explain() -> Unusable:
    unusable = why_not_usable()
    assert unusable is not None
    return unusable


@pytest.mark.parametrize("macos", ["14.0", "14.5", "15.6.1", "26.0"])
def test_apple_silicon_with_a_recent_macos_is_usable(
    pretend_mac: Callable[..., None], macos: str
) -> None:
    pretend_mac(macos=macos)
    assert why_not_usable() is None


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


def test_a_pytorch_without_mps_is_to_be_replaced(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(has_mps_build=False, is_mps_available=False)
    assert "built without MPS" in explain().reason
    assert "pip install --force-reinstall torch" in explain().remedy


def test_a_gpu_that_metal_hides_is_the_reason(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(is_mps_available=False)
    assert explain().reason == "Metal shows no GPU to this process"


@pytest.mark.parametrize("text", VIRTUAL_MAC_TEXTS)
def test_a_virtual_mac_is_found_out_by_trying(pretend_mac: Callable[..., None], text: str) -> None:
    pretend_mac(failure=text)
    assert text in explain().reason
    assert explain().remedy.startswith("use --device cpu; the GPU of a virtual Mac can't be used")


def test_watermarks_that_pytorch_refuses_are_to_be_unset(
    pretend_mac: Callable[..., None],
) -> None:
    pretend_mac(failure="invalid low watermark ratio 1.4")
    assert explain().remedy.startswith("unset PYTORCH_MPS_HIGH_WATERMARK_RATIO and ")


def test_a_failure_that_nobody_knows_is_told_with_its_text(
    pretend_mac: Callable[..., None],
) -> None:
    pretend_mac(failure="Internal Error (0000000e:Internal Error)")
    assert "0000000e" in explain().reason
    assert "github.com/pytorch/pytorch/issues" in explain().remedy
