from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_training import copied_parameters, cut_all_rows, random_examples, tiny_trainer
from torch import nn

from finetune.devices.captured import CapturedFunction, Tensors
from finetune.devices.cuda import CudaDevice
from finetune.training.trainer import Trainer

pytestmark = pytest.mark.cuda


def take_steps(
    trainer: Trainer, *, steps: int = 60, batch_size: int = 13
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take steps with three alternating batch sizes, and return losses and parameters."""
    torch.manual_seed(0)
    batches = [random_examples(rows) for rows in (13, 11, 12)]
    losses = [
        trainer.take_step(
            number, cut_all_rows(trainer, batches[number % 3], batch_size=batch_size)
        ).item()
        for number in range(steps)
    ]
    return losses, copied_parameters(trainer.model)


def without_capture(device: CudaDevice) -> CudaDevice:
    device.capture = lambda function: None  # type: ignore[method-assign]
    return device


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["full", "last-1", "head"])
@pytest.mark.parametrize("batch_size", [13, 4])
def test_captured_steps_are_bit_identical_to_eager_steps(
    mode: str, precision: str, dropout: float, batch_size: int
) -> None:
    options: dict[str, Any] = {"mode": mode, "precision": precision, "dropout": dropout}
    captured = tiny_trainer(device=CudaDevice(), total_steps=60, **options)
    plain = tiny_trainer(device=without_capture(CudaDevice()), total_steps=60, **options)
    losses, parameters = take_steps(captured, batch_size=batch_size)
    expected_losses, expected = take_steps(plain, batch_size=batch_size)
    assert captured.cuda_graph_error is None
    assert losses == expected_losses
    for name, one in parameters.items():
        assert torch.equal(one, expected[name]), name


class Branching(nn.Module):
    """A layer whose next operation depends on a value on the device."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **options: Any) -> Any:
        found = self.inner(*arguments, **options)
        return found * 2 if found.sum().item() > 0 else found


def test_model_that_cannot_be_captured_trains_eagerly() -> None:
    def make(device: CudaDevice) -> Trainer:
        state = tiny_trainer(device=device, total_steps=60)
        state.model.classifier = Branching(state.model.classifier)
        return state

    captured = make(CudaDevice())
    losses, parameters = take_steps(captured, steps=6)
    expected_losses, expected = take_steps(make(without_capture(CudaDevice())), steps=6)
    assert "captur" in (captured.cuda_graph_error or "")
    assert losses == expected_losses
    assert all(torch.equal(one, expected[name]) for name, one in parameters.items())


def graphs_of(function: Callable[[Sequence[Tensors]], torch.Tensor]) -> CapturedFunction:
    return CudaDevice().capture(function)


def test_out_of_memory_during_capture_is_raised_and_keeps_the_random_state() -> None:
    def work(arguments: Sequence[Tensors]) -> torch.Tensor:
        dropped = nn.functional.dropout(arguments[0]["x"])
        return dropped.sum() + torch.empty(2**50, device="cuda").sum()

    graphs = graphs_of(work)
    arguments = [{"x": torch.ones(8, device="cuda")}]
    assert graphs.prepare(arguments) is None
    torch.manual_seed(0)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(0)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.prepare(arguments)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
