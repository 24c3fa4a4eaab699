"""What devices are timed at, and the kind of it that is a module with a batch."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from finetune.bench.groups import Group
from finetune.devices.base import Device
from finetune.model.factory import loss_of

Phase = Literal["training", "evaluation"]
Batch = Mapping[str, Any]


class Task(ABC):
    """A workload on a device: ``load`` the rows of a step, then take steps or evaluate."""

    @abstractmethod
    def load(self, rows: int) -> None:
        """Make ready what a step takes."""

    @abstractmethod
    def step(self) -> None:
        """Take a step of training with the rows."""

    @abstractmethod
    def evaluate(self) -> None:
        """Compute the outputs of the rows, without gradients."""


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """What devices are timed at.

    Args:
        group: Of the table that it is in.
        name: In tables, unique within its group.
        rows: Rows a step.
        least_rows: The fewest rows that are timed where a step takes too long, or too much memory;
            ``rows`` where only they are of interest.
        phases: What is timed.
        gigaflops: Of a row's forward, for the estimate of the time that all takes.
        device: The only device that it is for; None for all.
    """

    group: Group | Literal["own"]
    name: str
    rows: int
    least_rows: int = 1
    phases: tuple[Phase, ...]
    gigaflops: float = 0.0
    device: str | None = None

    @abstractmethod
    def build(self, device: Device) -> Task:
        """Make the model on a device."""

    def is_for(self, device: str) -> bool:
        """Return whether a device, by its name, is to be timed."""
        return self.device in (None, device)


@dataclass(frozen=True, kw_only=True)
class ModuleWorkload(Workload):
    """A module that is given a batch of keyword arguments.

    Args:
        make: Returns the module, on the CPU.
        make_batch: Returns the keyword arguments for so many rows, on the CPU. The loss is the
            output's, or the sum of its floating-point tensors.
        make_optimizer: Of what trains; without, a step is a forward and a backward.
    """

    make: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None

    def build(self, device: Device) -> Task:
        """Make the module on a device."""
        module = self.make().to(device.torch_device)
        trained = [one for one in module.parameters() if one.requires_grad]
        optimizer = self.make_optimizer(trained) if self.make_optimizer else None
        return _ModuleTask(module, optimizer, device, self.make_batch)


class _ModuleTask(Task):
    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: Device,
        make_batch: Callable[[int], Batch],
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._device, self._make_batch = device, make_batch
        self._batch: Batch = {}

    def load(self, rows: int) -> None:
        # All kernels, as PyTorch has them by default.
        self._device.choose_attention(longest_tokens=sys.maxsize)
        self._batch = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.to(self._device.torch_device),
            dict(self._make_batch(rows)),
        )

    def step(self) -> None:
        self._module.train()
        self._module.zero_grad(set_to_none=True)
        loss_of(self._module(**self._batch)).backward()  # type: ignore[no-untyped-call]
        if self._optimizer:
            self._optimizer.step()

    def evaluate(self) -> None:
        self._module.eval()
        with torch.inference_mode():
            self._module(**self._batch)
