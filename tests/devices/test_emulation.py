from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from finetune.batch_finder.estimate import LiveMemory
from finetune.devices.private import keeping_memory_as

NUMBERS = 2**16


def kept_bytes(
    action: Callable[[torch.Tensor], torch.Tensor],
    *shape: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the bytes that an action keeps besides its input: saved tensors and the result."""
    with (
        FakeTensorMode(),
        LiveMemory() as memory,
        keeping_memory_as(device),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
    ):
        tensor = torch.ones(*shape, dtype=dtype, requires_grad=True)
        before = memory.live_bytes
        result = action(tensor)
        kept = memory.live_bytes - before
        del result
        return kept


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_by_matrices_keeps_what_grows_with_the_tokens_squared(dropout: float) -> None:
    def attend(tensor: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=dropout)

    few, many = (kept_bytes(attend, 2, 4, tokens, 8, device="mps") for tokens in (128, 512))
    assert many > 12 * few
