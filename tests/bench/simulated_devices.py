"""Devices with a speed, a memory and faults of their own, and work that takes no time."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune.bench.timer import Effort
from finetune.bench.workload import Task, Workload
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice

EFFORT = Effort(
    step_seconds=10.0, least_seconds=0.1, repeats=3, fewest_repeats=2, most_seconds=100.0
)


class SimulatedDevice(CpuDevice):
    """A device on which a row takes some seconds, and whose memory holds some rows."""

    def __init__(
        self, name: str = "cpu", *, row_seconds: float = 1.0, holds: int = 1000,
        fault: Exception | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.row_seconds, self.holds, self.fault = name, row_seconds, holds, fault
        self.rows = 0
        self.timed: list[tuple[str, int]] = []

    def time_calls(self, work: Callable[[], object], *, calls: int) -> float:
        work()
        self.timed.append((self.name, self.rows))
        return calls * self.rows * self.row_seconds


@dataclass(frozen=True, kw_only=True)
class SimulatedWorkload(Workload):
    def build(self, device: Device) -> Task:
        assert isinstance(device, SimulatedDevice)
        return _SimulatedTask(device)


class _SimulatedTask(Task):
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def load(self, rows: int) -> None:
        self._device.rows = rows

    def step(self) -> None:
        if self._device.fault:
            raise self._device.fault
        if self._device.rows > self._device.holds:
            raise MemoryError

    def evaluate(self) -> None:
        self.step()


def a_workload(*, rows: int = 8, least_rows: int = 1) -> SimulatedWorkload:
    return SimulatedWorkload(
        group="mlp", name="small", rows=rows, least_rows=least_rows, phases=("training",)
    )
