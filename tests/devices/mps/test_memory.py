from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from batch_finder.simulated_machines import UnifiedMemoryMac
from tiny_training import simulate_memory

from finetune.devices import host_memory
from finetune.devices.mps.memory import MpsMemory

GIB = 2**30
WITHOUT_STATISTICS = (
    'device_allocator INTERNAL ASSERT FAILED at "c10/core/CachingDeviceAllocator.h":253, please '
    "report a bug to PyTorch. Allocator for mps is not a DeviceAllocator."
)


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
    [
        (RuntimeError("MPS backend out of memory (MPS allocated: 1.20 GB, other ..."), True),
        (RuntimeError("Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)"), True),
        (RuntimeError("Invalid buffer size: 12.34 GiB"), True),
        (RuntimeError("Placeholder storage has not been allocated on MPS device!"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), False),
        (ValueError("Invalid buffer size: 12"), False),
    ],
)
def test_refused_memory_is_out_of_memory(error: Exception, is_out_of_memory: bool) -> None:
    assert MpsMemory().is_out_of_memory(error) == is_out_of_memory


def test_the_peak_is_counted_and_reset_where_the_allocator_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"allocated_bytes.all.current": 1_200, "allocated_bytes.all.peak": 5_000}

    def reset() -> None:
        stats["allocated_bytes.all.peak"] = stats["allocated_bytes.all.current"]

    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda: stats)
    monkeypatch.setattr(
        torch.accelerator, "max_memory_allocated", lambda: stats["allocated_bytes.all.peak"]
    )
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    assert MpsMemory().peak_bytes() == 5_000
    MpsMemory().reset_peak()
    assert MpsMemory().peak_bytes() == 1_200


def test_the_peak_is_unknown_where_the_allocator_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> dict[str, int]:
        raise RuntimeError(WITHOUT_STATISTICS)

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    MpsMemory().reset_peak()
    assert MpsMemory().peak_bytes() is None


@pytest.fixture
def pretend_memory(
    pretend_mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[float]]:
    """A Mac with 16 GiB, of which Metal recommends 10.5; sizes in GiB."""

    def pretend(*, available: float = 12, footprint: float = 0.5, driver: float = 0) -> list[float]:
        pretend_mac()
        fractions: list[float] = []

        def set_fraction(fraction: float) -> None:
            assert isinstance(fraction, float)  # PyTorch refuses an int.
            fractions.append(fraction)

        virtual_memory = SimpleNamespace(total=16 * GIB, available=int(available * GIB))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: virtual_memory)
        monkeypatch.setattr(host_memory, "process_bytes", lambda process_id: int(footprint * GIB))
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: int(10.5 * GIB))
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: int(driver * GIB))
        monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", set_fraction)
        return fractions

    return pretend


def test_the_budget_is_what_is_free_less_a_reserve_with_what_the_process_holds(
    pretend_memory: Callable[..., list[float]],
) -> None:
    pretend_memory(available=4.8, footprint=0.5)
    assert MpsMemory().budget_bytes(None) == pytest.approx((4.8 - 0.05 * 16 + 0.5) * GIB)


def test_the_budget_is_the_limit_that_the_user_or_the_environment_sets(
    pretend_memory: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_memory(available=14)
    assert MpsMemory().budget_bytes(2 * GIB) == 2 * GIB
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.5")
    assert MpsMemory().budget_bytes(None) == 5.25 * GIB
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0")
    assert MpsMemory().budget_bytes(None) == 10.5 * GIB


def test_the_cap_leaves_the_gpu_what_the_rest_of_the_process_does_not_hold(
    pretend_memory: Callable[..., list[float]],
) -> None:
    fractions = pretend_memory(footprint=1.0)
    MpsMemory().set_memory_limit(int(5.2 * GIB))
    assert fractions == [pytest.approx(4.2 / 10.5)]
    fractions = pretend_memory(footprint=4.0, driver=3.0)
    MpsMemory().set_memory_limit(int(5.2 * GIB))
    assert fractions == [pytest.approx(4.2 / 10.5)]


@pytest.mark.parametrize("counts_peak", [True, False])
def test_cache_of_many_shapes_runs_away_before_the_mac_swaps(
    counts_peak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = UnifiedMemoryMac(physical_bytes=64 * GIB, recommended_share=0.78)
    simulate_memory(mac, monkeypatch, counts_peak=counts_peak)
    shapes = 0
    while not MpsMemory().cache_exceeds_limit():
        shapes += 1
        mac.update(100 + shapes, 128)
    assert shapes > 3
    assert mac.driver_bytes > mac.recommended_bytes / 2
    assert mac.swap_bytes == 0
    torch.mps.empty_cache()
    assert not MpsMemory().cache_exceeds_limit()


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("physical_gib", [16, 32, 64])
def test_cache_of_a_run_with_few_shapes_does_not_run_away(
    physical_gib: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = UnifiedMemoryMac(physical_bytes=physical_gib * GIB, recommended_share=0.75)
    simulate_memory(mac, monkeypatch)
    fixed_and_widest_bytes = mac.fixed_bytes + 128 * rows * mac.token_bytes
    if 4 * fixed_and_widest_bytes > mac.recommended_bytes:
        pytest.skip("is too large for this Mac")
    for padded_length in (128, 22, 43, 64, 86, 107):
        mac.update(rows, padded_length)
        assert not MpsMemory().cache_exceeds_limit()
