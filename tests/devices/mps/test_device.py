from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from batch_finder.simulated_machines import UnifiedMemoryMac
from machines import INTEL_MAC, LINUX, ROSETTA, VIRTUAL_MAC_TEXTS, Machine, a_mac, simulate
from tiny_training import simulate_memory

from finetune.devices import host
from finetune.devices.mps.device import MpsDevice, MpsMemory

GIB = 2**30


@pytest.fixture
def device(simulate_mac: Callable[..., None]) -> MpsDevice:
    simulate_mac()
    return MpsDevice()


@pytest.mark.parametrize(
    ("chip", "macos", "version", "precisions", "examples"),
    [
        ("Apple M4", "15.6", "2.12.1", ("fp32", "bf16"), 1),
        ("Apple M5 Pro", "15.6", "2.12.1", ("fp32",), 1),
        ("Apple M5", "26.1", "2.13.0", ("fp32", "bf16", "fp16"), 1),
        ("Apple M1 Pro", "26.1", "2.13.0", ("fp32", "bf16", "fp16"), 2),
        ("Apple M1 Pro", "26.1", "2.14.0.dev20261001", ("fp32", "bf16", "fp16"), 2),
        ("Apple M1 Pro", "26.1", "2.14.0", ("fp32", "bf16", "fp16"), 1),
        ("Apple M1 Pro", "27.0", "2.13.0", ("fp32", "bf16", "fp16"), 1),
        ("Apple M2", "26.1", "2.13.0", ("fp32", "bf16", "fp16"), 1),
    ],
)
def test_precisions_and_batch_sizes_with_pytorch_bugs_are_excluded(
    simulate_mac: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    chip: str,
    macos: str,
    version: str,
    precisions: tuple[str, ...],
    examples: int,
) -> None:
    simulate_mac(chip=chip, macos=macos)
    monkeypatch.setattr(torch, "__version__", version)
    device = MpsDevice()
    assert (device.precisions, device.shapes.min_examples) == (precisions, examples)


@pytest.mark.parametrize(
    ("machine", "reason", "remedy"),
    [
        *((a_mac(macos=macos), None, "") for macos in ("14.0", "15.6.1", "26.0")),
        (LINUX, "MPS needs a Mac with Apple silicon, and this is Linux on x86_64", "--device cpu"),
        (INTEL_MAC, "Darwin on x86_64", "use --device cpu"),
        (ROSETTA, "under Rosetta", "CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11"),
        (
            a_mac(macos="13.6", is_mps_available=False),
            "MPS needs macOS 14 or newer, and this is 13.6",
            "update macOS",
        ),
        *(
            (a_mac(failure=text), text, "--device cpu if this is a virtual")
            for text in VIRTUAL_MAC_TEXTS
        ),
        (a_mac(failure="Error (0000000e)"), "0000000e", "github.com/pytorch/pytorch/issues"),
    ],
)
def test_each_machine_without_mps_has_a_reason_and_remedy(
    machine: Machine, reason: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(machine, monkeypatch)
    unusable = MpsDevice.why_not_usable()
    assert (unusable is None) is (reason is None)
    if unusable and reason:
        assert reason in unusable.reason
        assert remedy in unusable.remedy
        assert unusable.is_absent is (machine in (LINUX, INTEL_MAC))


@pytest.fixture
def simulate_mac_memory(
    simulate_mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[float]]:
    """A function that simulates a 16 GiB Mac with 10.5 GiB recommended by Metal. Sizes in GiB."""

    def simulate(
        *, available: float = 12, footprint: float = 0.5, driver: float = 0
    ) -> list[float]:
        simulate_mac()
        fractions: list[float] = []

        def set_fraction(fraction: float) -> None:
            assert isinstance(fraction, float)  # PyTorch rejects an int.
            fractions.append(fraction)

        virtual_memory = SimpleNamespace(total=16 * GIB, available=int(available * GIB))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: virtual_memory)
        monkeypatch.setattr(host, "process_bytes", lambda process_id: int(footprint * GIB))
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: int(10.5 * GIB))
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: int(driver * GIB))
        monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", set_fraction)
        return fractions

    return simulate


def test_budget_follows_the_limit_of_the_user_or_the_environment(
    simulate_mac_memory: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_mac_memory(available=14)
    assert MpsMemory().budget_bytes(2 * GIB) == 2 * GIB
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.5")
    assert MpsMemory().budget_bytes(None) == 5.25 * GIB
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0")
    assert MpsMemory().budget_bytes(None) == 10.5 * GIB


def test_gpu_memory_limit_excludes_other_memory_of_the_process(
    simulate_mac_memory: Callable[..., list[float]],
) -> None:
    fractions = simulate_mac_memory(footprint=1.0)
    MpsMemory().set_memory_limit(int(5.2 * GIB))
    assert fractions == [pytest.approx(4.2 / 10.5)]
    fractions = simulate_mac_memory(footprint=4.0, driver=3.0)
    MpsMemory().set_memory_limit(int(5.2 * GIB))
    assert fractions == [pytest.approx(4.2 / 10.5)]


@pytest.mark.parametrize("counts_peak", [True, False])
def test_cache_limit_is_reached_before_the_mac_swaps(
    counts_peak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = UnifiedMemoryMac(physical_bytes=64 * GIB, recommended_share=0.78)
    simulate_memory(mac, monkeypatch, counts_peak=counts_peak)
    shapes = 0
    while not MpsMemory().cache_exceeds_limit():
        shapes += 1
        mac.take_step(100 + shapes, 128)
    assert shapes > 3
    assert mac.driver_bytes > mac.recommended_bytes / 2
    assert mac.swap_bytes == 0
    torch.mps.empty_cache()
    assert not MpsMemory().cache_exceeds_limit()
