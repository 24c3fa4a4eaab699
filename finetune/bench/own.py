"""A network of the user's own, from ``package.module:function``."""

import torch
from torch.utils._pytree import tree_iter

from finetune.bench.workload import ModuleWorkload
from finetune.model.factory import load_factory


def own_workload(name: str) -> ModuleWorkload:
    """Return a module with the batch that its function gives, of as many rows as its first tensor.

    Raises:
        UsageError: As :func:`load_factory` does.
    """
    _, batch = load_factory(name)
    tensors = (one for one in tree_iter(batch) if isinstance(one, torch.Tensor) and one.ndim)
    rows = len(next(tensors, [None]))
    return ModuleWorkload(
        group="own",
        name=name,
        rows=rows,
        least_rows=rows,
        phases=("training", "evaluation"),
        make=lambda: load_factory(name)[0],
        make_batch=lambda _: batch,
    )
