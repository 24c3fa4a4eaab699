import platform
import resource
from collections.abc import Callable, Iterator

import pytest
import torch
from machines import MACHINES, simulate

from finetune import events
from finetune.devices.base import BatchShapes, BatchSize, DeviceMemory
from finetune.devices.cpu import CpuDevice, CpuMemory
from finetune.devices.cuda import CudaMemory
from finetune.devices.host import HIGH
from finetune.devices.mps.device import MpsMemory
from finetune.devices.select import describe_choice, select_device
from finetune.events import Event, sent_to


def test_auto_skips_a_gpu_that_does_not_work(simulate_mac: Callable[..., None]) -> None:
    simulate_mac(failure="MPS backend out of memory")
    emitted: list[Event] = []
    with sent_to(emitted.append):
        assert select_device("auto").name == "cpu"
    assert isinstance(emitted[0], events.WarningMessage)
    assert "MPS backend out of memory" in emitted[0].message


CPU_FAILS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000 bytes."


@pytest.mark.parametrize(
    ("memory", "error", "is_out_of_memory"),
    [
        (CpuMemory, MemoryError(), True),
        (CpuMemory, RuntimeError(f"[enforce fail] {CPU_FAILS}"), True),
        (CpuMemory, RuntimeError("data. DefaultCPUAllocator: not enough memory: you tried"), True),
        (CpuMemory, RuntimeError("terminate called ... 'std::bad_alloc'"), True),
        (CpuMemory, RuntimeError("could not create a primitive"), True),
        (CpuMemory, RuntimeError("libgomp: Out of memory allocating 1073741824 bytes"), True),
        (CudaMemory, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."), True),
        (CudaMemory, RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
        (CudaMemory, RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), True),
        (CudaMemory, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (MpsMemory, RuntimeError("MPS backend out of memory (MPS allocated: 1.20 GB, other"), True),
        (MpsMemory, RuntimeError("(kIOGPUCommandBufferCallbackErrorOutOfMemory)"), True),
        (MpsMemory, RuntimeError("Invalid buffer size: 12.34 GiB"), True),
        (MpsMemory, RuntimeError("Placeholder storage has not been allocated on MPS"), False),
        (MpsMemory, RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), False),
        (MpsMemory, ValueError("Invalid buffer size: 12"), False),
    ],
)
def test_allocation_failures_are_recognized_as_out_of_memory(
    memory: Callable[[], DeviceMemory], error: Exception, is_out_of_memory: bool
) -> None:
    assert memory().is_out_of_memory(error) == is_out_of_memory


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HIGH, raising=False)


@pytest.mark.parametrize("name", MACHINES)
def test_unusable_requested_device_is_a_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"auto", "cpu"}
    if name in ("macOS 14", "macOS 26", "M1 with 8 GB", "M4 Max"):
        works.add("mps")
    if name == "Linux with CUDA":
        works.add("cuda")
    simulate(MACHINES[name], monkeypatch)
    for device in ("auto", "cpu", "mps", "cuda"):
        check = describe_choice(device)
        assert check.status == ("ok" if device in works else "failure"), device
        assert bool(check.remedy) == (device not in works), device


def test_peak_memory_is_measured_since_the_last_reset() -> None:
    device = CpuDevice()
    torch.ones(64, 2**20, dtype=torch.uint8)
    before_bytes = device.memory.peak_bytes() or 0
    device.memory.reset_peak()
    assert (device.memory.peak_bytes() or 0) < before_bytes - 32 * 2**20
    assert device.memory.peak_reserved_bytes() == device.memory.peak_bytes()


@pytest.fixture
def _lift_cap() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems have no such limit")
@pytest.mark.usefixtures("_lift_cap")
def test_only_allocations_above_the_memory_limit_fail() -> None:
    device = CpuDevice()
    device.memory.set_memory_limit(device.memory.allocated_bytes() + 128 * 2**20)
    assert len(torch.ones(64, 2**20, dtype=torch.uint8)) == 64
    with pytest.raises(RuntimeError) as caught:
        # More than earlier tests freed, because the C library keeps freed memory.
        torch.ones(2**10, 2**20, dtype=torch.uint8)
    assert device.memory.is_out_of_memory(caught.value)
    device.memory.set_memory_limit(device.memory.allocated_bytes() + 512 * 2**20)
    assert len(torch.ones(192, 2**20, dtype=torch.uint8)) == 192


def test_batches_are_limited_to_sizes_that_the_device_computes_correctly() -> None:
    device, emitted = CpuDevice(), list[Event]()
    device.shapes = BatchShapes(max_tokens=32_766)
    size = BatchSize(64, "batch size", device)
    with sent_to(emitted.append):
        size.clamp(padded_length=511)
        assert (size.examples, emitted) == (64, [])
        size.clamp(padded_length=512)
    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert (size.examples, "is 63 instead of 64" in warning.message) == (63, True)
