import pytest
import torch

from finetune.devices.mps import memory

WITHOUT_STATISTICS = (
    'device_allocator INTERNAL ASSERT FAILED at "c10/core/CachingDeviceAllocator.h":253, please '
    "report a bug to PyTorch. Allocator for mps is not a DeviceAllocator."
)


@pytest.mark.parametrize(
    "text",
    [
        "MPS backend out of memory (MPS allocated: 1.20 GB, other allocations: 0 bytes, max "
        "allowed: 1.30 GB). Tried to allocate 256.00 MiB on shared pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may "
        "cause system failure).",
        "MPS backend out of memory (MPS allocated: 7.23 GB, other allocations: 1.54 GB, max "
        "allowed: 9.07 GB). Tried to allocate 896.00 MB on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may "
        "cause system failure).",
        "MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB). Tried "
        "to allocate 5.81 GiB on private pool.",
        "Invalid buffer size: 12.34 GB",
        "Invalid buffer size: 12.34 GiB",
    ],
)
def test_refused_memory_is_out_of_memory(text: str) -> None:
    assert memory.is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Placeholder storage has not been allocated on MPS device!"),
        RuntimeError("invalid low watermark ratio 1.4"),
        RuntimeError("Cannot convert a MPS Tensor to float64 dtype"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        ValueError("Invalid buffer size: 12"),
    ],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not memory.is_out_of_memory(error)


def test_the_memory_in_use_is_that_of_live_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 1_200)
    assert memory.used_bytes() == 1_200


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
    assert memory.peak_bytes() == 5_000
    memory.reset_peak()
    assert memory.peak_bytes() == 1_200


def test_the_peak_is_unknown_where_the_allocator_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> dict[str, int]:
        raise RuntimeError(WITHOUT_STATISTICS)

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    memory.reset_peak()
    assert memory.peak_bytes() is None


def test_another_failure_of_the_allocator_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "memory_stats", fail)
    with pytest.raises(RuntimeError, match="none is available"):
        memory.peak_bytes()
