"""The private names of PyTorch that this package needs; no other module uses any.

tests/devices/test_private.py says which of them a new version of PyTorch has changed.
"""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensorMode",
    "TorchDispatchMode",
    "copy_each",
    "current_autograd_node",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

copy_each = torch._foreach_copy_
current_autograd_node = torch._C._current_autograd_node
