"""What devices are timed at, for how long, and how to build it from a module with a batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from finetune.bench.results import Phase, Row
from finetune.devices.base import Device
from finetune.model.factory import loss_of

_PRODUCT_WIDTH = 1024
# What a step reaches of the speed of large products.
_SHARE_OF_PRODUCTS = 0.6
_BUILD_SECONDS = 0.5

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""What is timed: a step of training with some rows, or their outputs, without gradients."""
Load = Callable[[int], Steps]
"""Makes so many rows ready, and what is done with them."""
Build = Callable[[Device], Load]
"""Makes a model on a device."""


@dataclass(frozen=True)
class Effort:
    """How long is timed.

    Args:
        step_seconds: A step that takes longer is taken with fewer rows.
        timing_seconds: Of one timing: as many steps as it takes.
        visit_seconds: Of the timings of a row, before it is another workload's turn.
        total_seconds: Of all workloads: while they are not over, each is timed again.
    """

    step_seconds: float
    timing_seconds: float
    visit_seconds: float
    total_seconds: float


FULL = Effort(step_seconds=7.0, timing_seconds=0.5, visit_seconds=1.5, total_seconds=420.0)
QUICK = Effort(step_seconds=0.3, timing_seconds=0.05, visit_seconds=0.3, total_seconds=45.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What devices are timed at.

    Args:
        group: Of the table that it is in.
        name: In tables, unique within its group.
        build: Makes its model on a device.
        rows: Rows a step.
        least_rows: The fewest rows that are timed where a step takes too long, or too much memory;
            ``rows`` where only they are of interest.
        phases: What is timed.
        gigaflops: Of a row's forward, for the estimate of the time that all takes.
        device: The only device that it is for; None for all.
    """

    group: str
    name: str
    build: Build
    rows: int
    least_rows: int = 1
    phases: tuple[Phase, ...] = ("training", "evaluation")
    gigaflops: float = 0.0
    device: str | None = None

    def is_for(self, device: str) -> bool:
        """Return whether a device, by its name, is to be timed."""
        return self.device in (None, device)

    def estimate_seconds(self, *, gigaflops_a_second: float, effort: Effort) -> float:
        """Return about how long a visit to it takes on a device.

        Args:
            gigaflops_a_second: What ``measure_products`` returned.
            effort: How long is timed.
        """
        total = _BUILD_SECONDS
        for phase in self.phases:
            gigaflops = self.gigaflops * (3 if phase == "training" else 1)
            row_seconds = gigaflops / (_SHARE_OF_PRODUCTS * gigaflops_a_second)
            least, step = self.least_rows * row_seconds, self.rows * row_seconds
            step = max(least, min(step, effort.step_seconds))
            # At least two steps; and where rows are added, as long as a step on the way there.
            total += max(2 * step, effort.visit_seconds) + step * (least < step)
        return total

    def row(self, phase: Phase, device: str, *, note: str = "") -> Row:
        """Return a row of it without timings."""
        return Row(
            group=self.group,
            workload=self.name,
            phase=phase,
            device=device,
            rows=self.rows,
            note=note,
        )


def measure_products(device: Device) -> float:
    """Return the gigaflops a second of a product of large matrices."""
    factor = torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device=device.torch_device)
    seconds = min(device.time_calls(lambda: factor @ factor, calls=1) for _ in range(3))
    return 2e-9 * _PRODUCT_WIDTH**3 / seconds


def build_module(
    make: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Build:
    """Return what builds a module that is given a batch of keyword arguments.

    Args:
        make: Returns the module, on the CPU.
        make_batch: Returns the keyword arguments for so many rows, on the CPU. The loss is the
            output's, or the sum of its floating-point tensors.
        make_optimizer: Of what trains; without, a step is a forward and a backward.
    """

    def build(device: Device) -> Load:
        module = make().to(device.torch_device)
        trained = [one for one in module.parameters() if one.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer else None

        def load(rows: int) -> Steps:
            device.choose_attention(longest_tokens=None)
            batch = tree_map_only(
                torch.Tensor, lambda one: one.to(device.torch_device), dict(make_batch(rows))
            )
            return {
                "training": partial(_take_step, module, batch, optimizer),
                "evaluation": partial(_evaluate, module, batch),
            }

        return load

    return build


def _take_step(module: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None) -> None:
    module.train()
    module.zero_grad(set_to_none=True)
    loss_of(module(**batch)).backward()  # type: ignore[no-untyped-call]
    if optimizer:
        optimizer.step()


def _evaluate(module: nn.Module, batch: Batch) -> None:
    module.eval()
    with torch.inference_mode():
        module(**batch)
