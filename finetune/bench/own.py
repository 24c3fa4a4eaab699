"""A network of the user's own, from ``package.module:function``."""

import torch
from torch.utils._pytree import tree_iter

from finetune.bench.workload import Workload, build_module
from finetune.model.factory import load_factory


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
