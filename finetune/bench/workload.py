"""What devices are timed at, and how to build it from a module with a batch."""

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

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""What is timed: a step of training with some rows, or their outputs, without gradients."""
Load = Callable[[int], Steps]
"""Makes so many rows ready, and what is done with them."""
Build = Callable[[Device], Load]
"""Makes a model on a device."""


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
