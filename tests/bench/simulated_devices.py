"""Simulated devices with a speed, a memory and faults, and work that takes no time."""

from collections.abc import Callable

from finetune.bench.workloads import Limits, MakeSteps, Steps, Workload
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice

LIMITS = Limits(step_seconds=10.0, repeat_seconds=0.3, total_seconds=60.0)


class SimulatedDevice(CpuDevice):
    """A device with a time per row and a maximum number of rows.

    Each of the first ``cold_steps`` steps takes twice as long as the next.
    """

    def __init__(
        self, name: str = "cpu", *, row_seconds: float = 1.0, holds: int = 1000,
        fault: Exception | None = None, cold_steps: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.row_seconds, self.holds, self.fault = name, row_seconds, holds, fault
        self.rows = 0
        self.memory.set_memory_limit = lambda _: None  # not the random state of the tests
        self.cold_steps = cold_steps

    def time_calls(self, work: Callable[[], object], *, calls: int) -> float:
        slowdown = 2**self.cold_steps
        work()
        return calls * self.rows * self.row_seconds * slowdown


def _build(device: Device) -> MakeSteps:
    assert isinstance(device, SimulatedDevice)

    def take_step() -> None:
        device.cold_steps = max(0, device.cold_steps - 1)
        if device.fault:
            raise device.fault
        if device.rows > device.holds:
            raise MemoryError

    def make_steps(rows: int) -> Steps:
        device.rows = rows
        return {"training": take_step}

    return make_steps


def a_workload(*, name: str = "small", rows: int = 8, min_rows: int = 1) -> Workload:
    return Workload("mlp", name, _build, rows, min_rows=min_rows, phases=("training",))
