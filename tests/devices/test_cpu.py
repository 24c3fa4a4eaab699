import platform
import resource
from collections.abc import Iterator

import pytest
import torch

from finetune.devices.cpu import CpuDevice


def test_the_peak_is_that_since_the_reset() -> None:
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
def test_allocations_beyond_the_cap_fail_and_those_within_it_do_not() -> None:
    device = CpuDevice()
    device.memory.set_memory_limit(device.memory.allocated_bytes() + 128 * 2**20)
    assert len(torch.ones(64, 2**20, dtype=torch.uint8)) == 64
    with pytest.raises(RuntimeError) as caught:
        # More than earlier tests have freed, because the C library keeps freed memory.
        torch.ones(2**10, 2**20, dtype=torch.uint8)
    assert device.memory.is_out_of_memory(caught.value)
    device.memory.set_memory_limit(device.memory.allocated_bytes() + 512 * 2**20)
    assert len(torch.ones(192, 2**20, dtype=torch.uint8)) == 192
