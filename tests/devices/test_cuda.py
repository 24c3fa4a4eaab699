from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from finetune.devices.cuda import CudaDevice
from finetune.errors import UsageError

GIB = 2**30
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed "
    "a driver from http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    ("failure", "is_absent"),
    [
        (None, False),
        (NO_DRIVER, True),
        (OLD_DRIVER, False),
        ("No CUDA GPUs are available", True),
        (NO_KERNEL, False),
    ],
)
def test_failed_first_operation_is_the_reason_that_cuda_is_unusable(
    simulate_nvidia: Callable[..., None], failure: str | None, is_absent: bool
) -> None:
    simulate_nvidia(failure=failure)
    unusable = CudaDevice.why_not_usable()
    assert (unusable is None) is (failure is None)
    if unusable and failure:
        assert failure in unusable.reason
        assert unusable.is_absent == is_absent


@pytest.mark.parametrize("others", [["GPU-1"], ["GPU-0"]])
def test_processes_that_share_a_gpu_are_rejected(
    others: list[str], simulate_nvidia: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(found: list[str | None], own: str) -> None:
        found[:] = [own, *others]

    simulate_nvidia()
    device = CudaDevice()
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    monkeypatch.setattr(distributed, "new_group", lambda backend: backend)
    if others == ["GPU-1"]:
        assert device.make_group() == "nccl"
    else:
        with pytest.raises(UsageError, match="several ranks share one GPU"):
            device.make_group()


@pytest.mark.parametrize(
    ("free_gib", "limit_gib", "budget_gib"),
    [(100, None, 101.5), (100, 24, 24), (10, 24, 11.5), (0, None, 2)],
)
def test_budget_is_free_and_cached_memory_minus_a_reserve_or_the_limit(
    simulate_nvidia: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    free_gib: int,
    limit_gib: int | None,
    budget_gib: float,
) -> None:
    simulate_nvidia()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    limit_bytes = limit_gib and limit_gib * GIB
    assert CudaDevice().memory.budget_bytes(limit_bytes) == budget_gib * GIB
