import pytest
from machines import LINUX_WITH_CUDA, MACHINES, a_mac, pretend

from finetune.devices.check import HIGH, Check
from finetune.devices.checkup import check_device, describe_cuda, describe_mps


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIGH, raising=False)


def test_a_gpu_is_described_with_its_memory_and_pytorchs_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(a_mac(chip="Apple M4 Max", memory_gib=128.0), monkeypatch)
    gpu, memory = describe_mps()
    assert gpu.finding.startswith("built, available and usable: Apple M4 Max GPU")
    assert memory.status == "ok"
    assert memory.finding == (
        "recommended working set 96.0 GiB of 128.0 GiB; PyTorch refuses more than 163.2 GiB, and "
        "the Mac swaps before"
    )


@pytest.mark.parametrize("name", MACHINES)
def test_a_device_that_was_asked_for_is_a_failure_where_it_does_not_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = {"auto", "cpu"}
    if name in ("macOS 14", "macOS 26", "M1 with 8 GB", "M4 Max"):
        works.add("mps")
    if name == "Linux with CUDA":
        works.add("cuda")
    pretend(MACHINES[name], monkeypatch)
    for device in ("auto", "cpu", "mps", "cuda"):
        check = check_device(device)
        assert check.status == ("ok" if device in works else "failure"), device
        assert bool(check.remedy) == (device not in works), device


def test_cuda_and_the_gpu_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(LINUX_WITH_CUDA, monkeypatch)
    assert list(describe_cuda()) == [
        Check("cuda", "ok", "usable: PyTorch is built for CUDA 13.0"),
        Check("cuda_0", "ok", "NVIDIA H200, capability 9.0, 139.1 GiB of 139.8 GiB free"),
    ]
