"""A network of three linear layers, forward and backward: too small for a GPU, and larger ones."""

from itertools import pairwise

import torch
from torch import nn

from finetune.bench.workload import Workload, build_module

WIDTHS = (1024, 512, 256)
_CLASSES = 10
_ROWS = 1024
_SCALES = (1, 4, 16)


def mlp_workloads() -> list[Workload]:
    """Return the network as published, and with its widths times 4 and 16."""
    return [_mlp([scale * width for width in WIDTHS] + [_CLASSES]) for scale in _SCALES]


def _mlp(widths: list[int]) -> Workload:
    return Workload(
        group="mlp",
        name="-".join(map(str, widths)),
        build=build_module(
            lambda: make_mlp(widths), lambda rows: {"input": torch.randn(rows, widths[0])}
        ),
        rows=_ROWS,
        phases=("training",),
        gigaflops=2e-9 * sum(one * other for one, other in pairwise(widths)),
    )


def make_mlp(widths: list[int]) -> nn.Module:
    """Return linear layers of these widths, with ReLU between them."""
    pairs = ((nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(widths))
    *layers, _ = (layer for pair in pairs for layer in pair)
    return nn.Sequential(*layers)
