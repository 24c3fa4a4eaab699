"""The workloads by group, and a network of the user's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_iter

from finetune.bench.inference import inference_workloads
from finetune.bench.networks import apple_workloads, mlp_workloads
from finetune.bench.results import Group
from finetune.bench.training import FoundSizes, training_workloads
from finetune.bench.workload import FULL, QUICK, Effort, Workload, build_module
from finetune.model.factory import load_factory


@dataclass(frozen=True, kw_only=True)
class AutoTunedOption:
    """What is timed.

    Args:
        groups: Of workloads, in order.
        model: A network of the user's own as ``package.module:function``; None for none.
        lengths: Tokens of the texts.
        found: Batch sizes that ``find-batch`` found, by device and mode.
        is_quick: Fewer batch sizes, and shorter timings.
    """

    groups: Sequence[Group]
    model: str | None
    lengths: Sequence[int]
    is_quick: bool
    found: FoundSizes = field(default_factory=dict)

    @property
    def effort(self) -> Effort:
        """How long is timed."""
        return QUICK if self.is_quick else FULL


def list_workloads(choice: AutoTunedOption) -> list[Workload]:
    """Return the workloads that were chosen, group by group, the user's own last.

    Raises:
        UsageError: If the user's own can't be made.
    """
    makers: Mapping[Group, Callable[[], Sequence[Workload]]] = {
        "mlp": mlp_workloads,
        "inference": lambda: inference_workloads(choice.lengths, is_quick=choice.is_quick),
        "training": lambda: training_workloads(
            choice.lengths, found=choice.found, is_quick=choice.is_quick
        ),
        "apple": apple_workloads,
    }
    chosen = [one for group in choice.groups for one in makers[group]()]
    if choice.model is not None:
        chosen.append(own_workload(choice.model))
    return chosen


def own_workload(name: str) -> Workload:
    """Return a module with the batch that its function gives, of as many rows as its first tensor.

    Raises:
        UsageError: As :func:`load_factory` does.
    """
    _, batch = load_factory(name)
    tensors = (one for one in tree_iter(batch) if isinstance(one, torch.Tensor) and one.ndim)
    rows = len(next(tensors, [None]))
    return Workload(
        group="own",
        name=name,
        build=build_module(lambda: load_factory(name)[0], lambda _: batch),
        rows=rows,
        least_rows=rows,
    )
