import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from finetune.training.clipping import clip_gradients, total_norm


def optimizer_with_gradients(scale: float) -> torch.optim.Optimizer:
    model = tiny_model()
    for seed, parameter in enumerate(model.parameters()):
        random = torch.Generator().manual_seed(seed)
        parameter.grad = scale * torch.randn(parameter.shape, generator=random)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1.0, fused=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return list(optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("scales_in_step", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1e2])
def test_step_is_that_of_gradients_clipped_by_pytorch(scale: float, scales_in_step: bool) -> None:
    expected, clipped = optimizer_with_gradients(scale), optimizer_with_gradients(scale)

    nn.utils.clip_grad_norm_(parameters_of(expected), 1.0)
    clip_gradients(clipped, max_norm=1.0, scales_in_step=scales_in_step)

    expected.step()
    clipped.step()
    for left, right in zip(parameters_of(expected), parameters_of(clipped), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("numbers", [3, 2**17])
def test_norm_shows_what_is_not_finite_in_small_and_large_tensors(
    numbers: int, value: float
) -> None:
    tensors = [
        torch.ones(3),
        torch.ones(2**17),
        torch.ones(numbers).index_fill(0, torch.tensor(2), value),
    ]
    assert total_norm(tensors[:2]) == pytest.approx((3 + 2**17) ** 0.5)
    assert not total_norm(tensors).isfinite()
