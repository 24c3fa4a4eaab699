from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from finetune.batch_finder.kernels import Attention, Kernels, imitate_kernels
from finetune.batch_finder.live_memory import LiveMemory

PROCESSOR = Kernels(attention="processor", has_packed_dropout=False, has_fp32_norms=False)
NUMBERS = 2**16


def kept_bytes(
    action: Callable[[torch.Tensor], torch.Tensor],
    *shape: int,
    kernels: Kernels,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return what an action keeps alive beside its input, for the backward pass or as result."""
    with (
        FakeTensorMode(),
        LiveMemory() as memory,
        imitate_kernels(kernels, is_autocast=dtype is not torch.float32),
    ):
        tensor = torch.ones(*shape, dtype=dtype, requires_grad=True)
        before = memory.live_bytes
        result = action(tensor)
        kept = memory.live_bytes - before
        del result
        return kept


def attend(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def action(tensor: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=dropout)

    return action


def attention_growth(attention: Attention, *, dropout: float) -> float:
    """Return how much more attention keeps of four times as many tokens."""
    kernels = Kernels(attention=attention, has_packed_dropout=False, has_fp32_norms=False)
    few, many = (
        kept_bytes(attend(dropout), 2, 4, tokens, 8, kernels=kernels) for tokens in (128, 512)
    )
    return many / few


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_attention_keeps_nothing_that_grows_with_the_tokens_squared(dropout: float) -> None:
    assert attention_growth("fused", dropout=dropout) == 4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_by_matrices_keeps_what_grows_with_the_tokens_squared(dropout: float) -> None:
    assert attention_growth("matrix", dropout=dropout) > 12


def test_the_processor_fuses_attention_that_has_no_dropout() -> None:
    assert attention_growth("processor", dropout=0.0) == 4
    assert attention_growth("processor", dropout=0.1) > 12


def test_dropout_keeps_a_byte_or_a_number_for_each_number() -> None:
    packed = Kernels(attention="fused", has_packed_dropout=True, has_fp32_norms=True)

    def drop(tensor: torch.Tensor) -> torch.Tensor:
        return functional.dropout(tensor, 0.1)

    assert kept_bytes(drop, NUMBERS, kernels=packed) == (4 + 1) * NUMBERS
    assert kept_bytes(drop, NUMBERS, kernels=PROCESSOR) == (4 + 4) * NUMBERS


@pytest.mark.parametrize("training", [False, True])
def test_dropout_that_drops_nothing_keeps_nothing(training: bool) -> None:
    packed = Kernels(attention="fused", has_packed_dropout=True, has_fp32_norms=True)
    share = 0.0 if training else 0.1
    layer = torch.nn.Dropout(share).train(training)
    assert kept_bytes(layer, NUMBERS, kernels=packed) == 0


def test_autocast_computes_norms_in_fp32_where_the_device_does() -> None:
    in_fp32 = Kernels(attention="fused", has_packed_dropout=True, has_fp32_norms=True)

    def normalize(tensor: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(tensor, [256])

    result, copy, mean_and_deviation = 4 * NUMBERS, 4 * NUMBERS, 2 * 4 * 256
    half = torch.bfloat16
    assert kept_bytes(normalize, 256, 256, kernels=in_fp32, dtype=half) == (
        result + copy + mean_and_deviation
    )
    assert kept_bytes(normalize, 256, 256, kernels=PROCESSOR, dtype=half) < result
