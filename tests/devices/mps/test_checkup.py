import pytest
from machines import a_mac, pretend

from finetune.devices.mps.checkup import describe_gpu
from finetune.devices.mps.watermarks import HIGH


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIGH, raising=False)


def test_a_gpu_is_described_with_its_memory_and_pytorchs_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(a_mac(chip="Apple M4 Max", memory_gib=128.0), monkeypatch)
    gpu, memory = describe_gpu()
    assert gpu.finding.startswith("built, available and usable: Apple M4 Max GPU")
    assert memory.status == "ok"
    assert memory.finding == (
        "recommended working set 96.0 GiB of 128.0 GiB; PyTorch refuses more than 163.2 GiB, and "
        "the Mac swaps before"
    )


def test_a_mac_with_8_gib_is_to_train_less(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(a_mac(chip="Apple M1", memory_gib=8.0), monkeypatch)
    _, memory = describe_gpu()
    assert memory.status == "warning"
    assert "--freeze-core" in memory.remedy


@pytest.mark.parametrize(
    ("high", "limit"), [("1.0", "refuses more than 10.7 GiB"), ("0", "limit is lifted")]
)
def test_the_limit_is_that_of_the_environment(
    high: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HIGH, high)
    pretend(a_mac(memory_gib=16.0), monkeypatch)
    _, memory = describe_gpu()
    assert memory.finding.endswith(limit)
