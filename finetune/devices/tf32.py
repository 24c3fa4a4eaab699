"""Whether products of fp32 numbers are computed from rounded ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let no device round the factors of products in fp32, for a while.

    PyTorch leaves matrices alone by default, but lets NVIDIA's convolutions keep 10 bits of 23.
    """
    of_matrices = torch.get_float32_matmul_precision()
    of_convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(of_matrices)
        torch.backends.cudnn.allow_tf32 = of_convolutions
