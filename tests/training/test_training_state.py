from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_training import copied_parameters, random_examples, take_steps, tiny_training_state

from finetune.devices.base import CapturedFunction, Tensors
from finetune.devices.cpu import CpuDevice


class CapturedOnCpu(CapturedFunction):
    """Stands for a device's: calls the function on tensors of its own, from the second call on."""

    failure: str | None = None

    def __init__(self, function: Callable[[Sequence[Tensors]], torch.Tensor]) -> None:
        self.function = function
        self.calls = 0
        self.is_warm = False

    def prepare(self, arguments: Sequence[Tensors]) -> Callable[[], torch.Tensor] | None:
        if self.failure or not self.is_warm:
            self.is_warm = True
            return None
        mine = [{name: one.clone() for name, one in each.items()} for each in arguments]
        return lambda: self._call(mine)

    def _call(self, arguments: Sequence[Tensors]) -> torch.Tensor:
        self.calls += 1
        return self.function(arguments)

    def clear(self) -> None:
        self.is_warm = False


class CapturingDevice(CpuDevice):
    captures = True

    def capture(self, function: Callable[[Sequence[Tensors]], torch.Tensor]) -> CapturedFunction:
        return CapturedOnCpu(function)


def captured_calls(training_state: Any) -> int:
    assert isinstance(training_state.captured, CapturedOnCpu)
    return training_state.captured.calls


def test_captured_updates_are_the_same_updates() -> None:
    captured, plain = tiny_training_state(device=CapturingDevice()), tiny_training_state()
    torch.manual_seed(0)
    losses = take_steps(captured, random_examples(), range(12))
    torch.manual_seed(0)
    assert losses == pytest.approx(take_steps(plain, random_examples(), range(12)), rel=1e-5)
    assert captured_calls(captured) == 11
    assert captured.cuda_graph_error is None
    expected = copied_parameters(plain.model)
    for name, one in copied_parameters(captured.model).items():
        # The learning rate is a tensor in fp32, not a number in fp64.
        torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_what_was_captured_is_dropped_with_the_optimizers_state() -> None:
    state = tiny_training_state(device=CapturingDevice())
    take_steps(state, random_examples(), range(3))
    state.forget()
    take_steps(state, random_examples(), range(1))
    assert captured_calls(state) == 2


def test_why_updates_are_not_captured_is_known() -> None:
    state = tiny_training_state(device=CapturingDevice())
    assert isinstance(state.captured, CapturedOnCpu)
    state.captured.failure = "it branches"
    take_steps(state, random_examples(), range(2))
    assert (captured_calls(state), state.cuda_graph_error) == (0, "it branches")
    assert tiny_training_state().cuda_graph_error is None
