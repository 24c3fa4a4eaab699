from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_training import copied_parameters, cut_all_rows, random_examples, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.devices.base import BatchSize, Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.cuda import CudaDevice
from finetune.training.optimizers import make_state

ROWS = 13
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 12582912 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.12 GiB is free."
)
ERROR = RuntimeError(CPU_TEXT)


class ScarceMemory(TorchDispatchMode):
    """Raises an error at an operation of a step that has too many rows.

    Args:
        most_rows: The maximum number of rows that fit in memory.
        at: The index of the operation that fails, or None to only count operations.
        only: Operations are ignored unless their names contain this.
        error: The error to raise.
    """

    def __init__(
        self, most_rows: int, *, at: int | None = None, only: str = "", error: Exception
    ) -> None:
        super().__init__()
        self.most_rows, self.at, self.only, self.error = most_rows, at, only, error
        self.operations = 0
        self.rows = 0
        self.failures = 0

    def begin(self, rows: int) -> None:
        self.rows, self.operations = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.only in func.overloadpacket.__name__ and func.namespace != "profiler":
            if self.rows > self.most_rows and self.operations == self.at:
                self.failures += 1
                self.rows = 0
                # A new error each time, because its traceback keeps all tensors alive.
                raise type(self.error)(*self.error.args)
            self.operations += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Training:
    """Steps on all rows, in micro-batches that fit in memory."""

    device: Device = field(default_factory=CpuDevice)
    batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rounding errors, which Adam would turn into large steps, don't show in such small steps.
        settings = {"dropout": 0.0, "learning_rate": 1e-5, "device": self.device, **self.options}
        self.state = tiny_trainer(**settings)
        self.examples = random_examples(ROWS)
        self.size = BatchSize(self.batch_size, "batch size", self.device)
        self.state.batch_size = self.size
        torch.manual_seed(0)

    def take(self, number: int, memory: ScarceMemory | None = None) -> float:
        def cut(rows: int) -> Iterator[Any]:
            if memory:
                memory.begin(rows)
            return cut_all_rows(self.state, self.examples, batch_size=rows)

        return self.state.step(number, cut).item()

    def parameters(self) -> dict[str, torch.Tensor]:
        return copied_parameters(self.state.model)


def assert_same(left: Training, right: Training, *, tolerance: float = 1e-6) -> None:
    others = right.parameters()
    for name, parameter in left.parameters().items():
        torch.testing.assert_close(parameter, others[name], rtol=0, atol=tolerance, msg=name)


def operations_before_the_step() -> int:
    """Return the number of operations before the update, with the largest micro-batches."""
    training = Training()
    counting = ScarceMemory(ROWS, error=ERROR)
    make_state(training.state.optimizer)
    with counting:
        rows = cut_all_rows(training.state, training.examples, batch_size=8)
        training.state.compute_gradients(rows)
    return counting.operations


@pytest.mark.parametrize(
    ("place", "is_first_step"), [(0.0, True), (0.3, False), (0.6, True), (0.9, True), (1.0, False)]
)
def test_step_recovers_from_out_of_memory_at_any_operation(
    place: float, is_first_step: bool
) -> None:
    expected, training = Training(batch_size=4), Training(batch_size=8)
    before = training.parameters()
    failing = 0 if is_first_step else 1
    at = round(place * (operations_before_the_step() - 1))
    scarce = ScarceMemory(4, at=at, error=ERROR)

    for number in range(3):
        expected.take(number)
        if number == failing:
            with scarce:
                training.take(number, scarce)
        else:
            training.take(number)

    assert scarce.failures == 1
    assert training.size.examples == 4
    assert_same(training, expected)
    after = training.parameters()
    assert max((after[name] - before[name]).abs().max() for name in before) > 2e-5


def test_repeated_step_uses_the_random_numbers_of_the_first_attempt() -> None:
    options = {"dropout": 0.3}
    expected, training = (Training(batch_size=size, options=options) for size in (4, 8))
    scarce = ScarceMemory(4, at=0, only="native_layer_norm_backward", error=ERROR)

    torch.manual_seed(1)
    expected.take(0)
    torch.manual_seed(1)
    with scarce:
        training.take(0, scarce)

    assert scarce.failures == 1
    assert_same(training, expected, tolerance=0)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("only", ["addmm", "native_layer_norm_backward", "_foreach_norm"])
def test_steps_are_repeated_on_a_real_gpu(only: str, precision: str) -> None:
    options = {"precision": precision}
    device = CudaDevice()
    expected, training = (
        Training(batch_size=size, device=device, options=options) for size in (4, 8)
    )
    scarce = ScarceMemory(4, at=0, only=only, error=torch.OutOfMemoryError(CUDA_TEXT))

    with scarce:
        for number in range(4):
            expected.take(number)
            training.take(number, scarce)

    assert scarce.failures == 1
    assert_same(training, expected, tolerance=1e-6 if precision == "fp32" else 2e-5)
