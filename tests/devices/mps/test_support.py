from collections.abc import Callable

import pytest

from finetune.devices.base import Unusable
from finetune.devices.mps.support import read_sysctl, why_not_usable

INTEL_SYSCTLS = {"machdep.cpu.brand_string": "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz"}
ROSETTA_SYSCTLS = {
    "sysctl.proc_translated": "1",
    "hw.optional.arm64": "1",
    "machdep.cpu.brand_string": "Apple M1",
}
# What GitHub's hosted runners answer (actions/runner-images#9918 and #11899).
VIRTUAL_MAC_TEXTS = [
    "MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: "
    "7.93 GB). Tried to allocate 256 bytes on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure).",
    "MPS backend out of memory (MPS allocated: 1024.00 MB). Tried to allocate 256 bytes on shared "
    "pool.",
]


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


def test_an_intel_mac_is_sent_to_its_processor(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(machine="x86_64", macos="13.6", sysctls=INTEL_SYSCTLS)
    assert "Intel processor" in explain().reason
    assert explain().remedy == "use --device cpu"


@pytest.mark.parametrize(
    "sysctls",
    [ROSETTA_SYSCTLS, {"sysctl.proc_translated": "1"}, {"hw.optional.arm64": "1"}],
    ids=["both", "translated", "arm64"],
)
def test_a_python_for_intel_on_apple_silicon_is_to_be_replaced(
    pretend_mac: Callable[..., None], sysctls: dict[str, str]
) -> None:
    pretend_mac(machine="x86_64", sysctls=sysctls)
    assert "under Rosetta" in explain().reason
    assert "CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11" in explain().remedy


@pytest.mark.parametrize("macos", ["12.3", "13.6"])
def test_an_old_macos_is_to_be_updated(pretend_mac: Callable[..., None], macos: str) -> None:
    pretend_mac(macos=macos, is_available=False)
    assert explain().reason == f"MPS needs macOS 14 or newer, and this is {macos}"
    assert "update macOS" in explain().remedy


def test_a_pytorch_without_mps_is_to_be_replaced(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(is_built=False, is_available=False)
    assert "built without MPS" in explain().reason
    assert "pip install --force-reinstall torch" in explain().remedy


def test_a_gpu_that_metal_hides_is_the_reason(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(is_available=False)
    assert explain().reason == "Metal shows no GPU to this process"


@pytest.mark.parametrize("text", VIRTUAL_MAC_TEXTS)
def test_a_virtual_mac_is_found_out_by_trying(pretend_mac: Callable[..., None], text: str) -> None:
    pretend_mac(failure=text)
    assert text in explain().reason
    assert explain().remedy.startswith("use --device cpu; the GPU of a virtual Mac can't be used")


def test_a_value_of_the_kernel_is_read_without_its_line_end(
    pretend_mac: Callable[..., None],
) -> None:
    pretend_mac()
    assert read_sysctl("machdep.cpu.brand_string") == "Apple M2"


def test_a_value_that_the_kernel_does_not_have_is_none(pretend_mac: Callable[..., None]) -> None:
    pretend_mac()
    assert read_sysctl("sysctl.proc_translated") is None
