"""About how long a bench takes, by the products of its workloads alone."""

import torch

from finetune.bench.timer import Effort
from finetune.bench.workload import Workload
from finetune.devices.base import Device

_PRODUCT_WIDTH = 1024
# What a step reaches of the speed of large products.
_SHARE_OF_PRODUCTS = 0.6
_BUILD_SECONDS = 0.5


def measure_products(device: Device) -> float:
    """Return the gigaflops a second of a product of large matrices."""
    factor = torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device=device.torch_device)
    seconds = min(device.time_calls(lambda: factor @ factor, calls=1) for _ in range(3))
    return 2e-9 * _PRODUCT_WIDTH**3 / seconds


def estimate_seconds(workload: Workload, *, gigaflops_a_second: float, effort: Effort) -> float:
    """Return about how long a visit to a workload takes on a device.

    Args:
        workload: To be timed.
        gigaflops_a_second: What ``measure_products`` returned.
        effort: How long is timed.
    """
    total = _BUILD_SECONDS
    for phase in workload.phases:
        gigaflops = workload.gigaflops * (3 if phase == "training" else 1)
        row_seconds = gigaflops / (_SHARE_OF_PRODUCTS * gigaflops_a_second)
        least, step = workload.least_rows * row_seconds, workload.rows * row_seconds
        step = max(least, min(step, effort.step_seconds))
        # At least two steps; and where rows are added, as long as a step on the way there.
        total += max(2 * step, effort.visit_seconds) + step * (least < step)
    return total
