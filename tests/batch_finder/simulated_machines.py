"""Simulated machines: their memory and speed follow rules that were measured."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from finetune.batch_finder import search
from finetune.batch_finder.results import Case
from finetune.devices.base import Device
from finetune.errors import ModelUnsupportedError
from finetune.events import Trial, TrialStatus, emit

MIB = 2**20
GIB = 2**30

# Functions of the batch size, which return bytes or seconds.
Curve = Callable[[int], float]


def rising_from(*, floor: float, base: float, row: float) -> Curve:
    """Return peak memory that is constant for small batches, and then grows linearly; in MiB."""
    return lambda batch_size: MIB * max(floor, base + row * batch_size)


def through(peaks_mib: dict[int, int]) -> Curve:
    """Return peak memory, interpolated linearly between measured points."""
    sizes = sorted(peaks_mib)

    def peak_bytes(batch_size: int) -> float:
        right = next((size for size in sizes[1:] if size >= batch_size), sizes[-1])
        left = sizes[sizes.index(right) - 1]
        slope = (peaks_mib[right] - peaks_mib[left]) / (right - left)
        return MIB * (peaks_mib[left] + slope * (batch_size - left))

    return peak_bytes


def saturating(*, start: float, row: float) -> Curve:
    """Return the seconds of a step on a GPU: a fixed cost plus a cost per row."""
    return lambda batch_size: start + row * batch_size


def overflowing(*, start: float, row: float, best: int) -> Curve:
    """Return the seconds of a step on a CPU: above the best size, rows slowly become slower."""
    return lambda batch_size: start + row * batch_size * max(1.0, batch_size / best) ** 0.08


# BERT-base, 128 tokens, bf16, H200: measured memory.
BERT_ON_H200 = rising_from(floor=2160, base=1962, row=49.5)
BERT_SECONDS_ON_H200 = saturating(start=0.016, row=0.0016)
# BERT-base, 64 tokens, fp32, CPU: measured peaks of resident memory.
BERT_ON_CPU_MIB = {8: 2577, 16: 3043, 32: 4128, 64: 5901, 128: 9934}


@dataclass
class SimulatedMachine:
    """A device with memory of its own, or a process under a cap.

    Args:
        peak_bytes: Peak memory of a batch.
        step_seconds: Time of a step.
        budget_bytes: The memory that the search may use.
        capacity_share: Fraction of the budget above which a batch fails.
        start_seconds: Time that a new process needs before it trains.
        timeout_seconds: Time after which a trial is stopped.
    """

    peak_bytes: Curve = BERT_ON_H200
    step_seconds: Curve = BERT_SECONDS_ON_H200
    budget_bytes: int = 8 * GIB
    capacity_share: float = 1.0
    start_seconds: float = 8.0
    timeout_seconds: float = float("inf")
    fresh_sizes: list[int] = field(init=False, default_factory=list)

    def fits(self, batch_size: int) -> bool:
        return self.peak_bytes(batch_size) <= self.capacity_share * self.budget_bytes

    def largest_fitting(self, *, limit: int = 100_000) -> int:
        """Return the true largest size, for memory that only grows."""
        low, high = 0, limit + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def examples_per_second(self, batch_size: int) -> float:
        return batch_size / self.step_seconds(batch_size)

    def best_examples_per_second(self) -> float:
        """Return the results of trying all sizes that fit."""
        largest = self.largest_fitting()
        step = max(1, largest // 500)
        return max(self.examples_per_second(size) for size in range(1, largest + 1, step))

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        if new_process:
            self.fresh_sizes.append(batch_size)
        trial = self._try(batch_size)
        return replace(trial, seconds=trial.seconds + self.start_seconds * new_process)

    def _try(self, batch_size: int) -> Trial:
        seconds = 3.5 * self.step_seconds(batch_size)
        if seconds > self.timeout_seconds:
            return did_not_fit(batch_size, "timed_out", seconds=self.timeout_seconds)
        if not self.fits(batch_size):
            return did_not_fit(batch_size, "too_big", seconds=seconds / 4)
        return fits(
            batch_size,
            peak_bytes=round(self.peak_bytes(batch_size)),
            examples_per_second=self.examples_per_second(batch_size),
            seconds=seconds,
        )


def fits(
    batch_size: int,
    *,
    peak_bytes: int | None = None,
    examples_per_second: float = 100.0,
    seconds: float = 1.0,
    part: str = "whole",
) -> Trial:
    return Trial(
        batch_size,
        "fits",
        peak_bytes=peak_bytes,
        examples_per_second=examples_per_second,
        seconds=seconds,
        part=part,
    )


def did_not_fit(
    batch_size: int, status: TrialStatus, *, seconds: float = 1.0, reason: str = ""
) -> Trial:
    return Trial(
        batch_size,
        status,
        peak_bytes=None,
        examples_per_second=None,
        seconds=seconds,
        reason=reason or status,
    )


@dataclass
class SimulatedRunner:
    """Replaces ``TrialRunner`` by simulated machines, without child processes.

    Args:
        machine: The machine of each trial.
        machines: Other machines, by the part or the mode of a case.
        with_checkpointing: The machine with gradient checkpointing; None: ``machine``.
        can_split: Whether models can be split at the first trainable layer.
        cases: The cases of the searches so far, in order.
    """

    machine: SimulatedMachine = field(default_factory=SimulatedMachine)
    machines: dict[str, SimulatedMachine] = field(default_factory=dict)
    with_checkpointing: SimulatedMachine | None = None
    can_split: bool = True
    cases: list[Case] = field(default_factory=list)

    def __call__(
        self, case: Case, device: Device, *, limit_bytes: int | None, timeout_seconds: float
    ) -> "SimulatedRunner":
        self.cases.append(case)
        if case.gradient_checkpointing:
            self.machine = self.with_checkpointing or self.machine
        self.limit_bytes, self.timeout_seconds = limit_bytes, timeout_seconds
        if limit_bytes is not None:
            self.machine = replace(self.machine, budget_bytes=limit_bytes)
        return self

    def __enter__(self) -> "SimulatedRunner":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def budget_bytes(self) -> int:
        return self.machine.budget_bytes

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        case = self.cases[-1]
        if case.part != "whole" and not self.can_split:
            raise ModelUnsupportedError("the frozen layers of Model can't be split off", remedy="-")
        machine = self.machines.get(case.part) or self.machines.get(case.mode) or self.machine
        trial = replace(machine.run(batch_size), part=case.part)
        emit(trial)
        return trial


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimulatedRunner:
    """Searches on a simulated machine, which tests may change."""
    simulated = SimulatedRunner()
    monkeypatch.setattr(search, "TrialRunner", simulated)
    return simulated


@dataclass
class UnifiedMemoryMac:
    """A Mac whose GPU shares the memory of the system, and swaps before allocations fail.

    Buffers are kept per shape, and only ``empty_cache`` frees them. Compiled graphs are never
    freed. Above the physical memory, a step is ten times slower. The error comes at the high
    watermark, which is even higher.

    Args:
        physical_bytes: Memory of the Mac.
        system_bytes: Memory of macOS and other programs.
        recommended_share: Fraction of memory that Metal recommends: 2/3 of 8 GB, 78% of 48 GB.
        fixed_bytes: Weights, gradients and the optimizer's state.
        token_bytes: Activations of one token.
        graph_bytes: Memory of a compiled graph; there is one per shape.
        high_watermark_ratio: Multiple of the recommended memory at which allocations fail.
        low_watermark_ratio: Multiple at which unused memory is freed.
        reports_swap: Whether trials also report swapping, apart from being slow.

    Attributes:
        peak_bytes: The peak memory of tensors.
    """

    physical_bytes: int = 8 * GIB
    system_bytes: int = int(2.5 * GIB)
    recommended_share: float = 2 / 3
    fixed_bytes: int = int(1.8 * GIB)
    token_bytes: int = int(0.45 * MIB)
    graph_bytes: int = 8 * MIB
    high_watermark_ratio: float = 1.7
    low_watermark_ratio: float = 1.4
    reports_swap: bool = True
    peak_bytes: int = field(init=False, default=0)
    shapes_seen: set[tuple[int, int]] = field(init=False, default_factory=set)
    buffer_bytes: dict[tuple[int, int], int] = field(init=False, default_factory=dict)

    @property
    def recommended_bytes(self) -> int:
        return int(self.recommended_share * self.physical_bytes)

    @property
    def live_bytes(self) -> int:
        """Return the memory of the tensors between steps."""
        return self.fixed_bytes

    @property
    def driver_bytes(self) -> int:
        graphs_bytes = self.graph_bytes * len(self.shapes_seen)
        return self.live_bytes + sum(self.buffer_bytes.values()) + graphs_bytes

    @property
    def swap_bytes(self) -> int:
        return max(0, self.driver_bytes + self.system_bytes - self.physical_bytes)

    def take_step(self, rows: int, padded_length: int) -> float:
        """Take one step and return its seconds.

        Raises: RuntimeError: If there is not enough memory.
        """
        shape, needed_bytes = (rows, padded_length), rows * padded_length * self.token_bytes
        missing_bytes = 0 if shape in self.buffer_bytes else needed_bytes
        if self.driver_bytes + missing_bytes > self.low_watermark_ratio * self.recommended_bytes:
            self.empty_cache()
            missing_bytes = needed_bytes
        if self.driver_bytes + missing_bytes > self.high_watermark_ratio * self.recommended_bytes:
            raise RuntimeError(self._refusal(missing_bytes))
        self.shapes_seen.add(shape)
        self.buffer_bytes[shape] = needed_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + needed_bytes)
        slowdown = 1 + 11 * min(1.0, self.swap_bytes / (0.1 * self.physical_bytes))
        return (0.2 + 0.003 * rows * padded_length) * slowdown

    def empty_cache(self) -> None:
        self.buffer_bytes.clear()

    def run(self, batch_size: int, *, new_process: bool = False, padded_length: int = 128) -> Trial:
        """Take three steps in a new process."""
        mac = replace(self)
        try:
            seconds = [mac.take_step(batch_size, padded_length) for _ in range(3)]
        except RuntimeError as error:
            return did_not_fit(batch_size, "too_big", reason=str(error))
        if self.reports_swap and mac.swap_bytes > 0:
            return did_not_fit(batch_size, "too_big", reason="the machine swapped")
        return fits(
            batch_size,
            peak_bytes=mac.driver_bytes,
            examples_per_second=batch_size / seconds[-1],
            seconds=sum(seconds),
        )

    def largest_without_swap(self, *, padded_length: int = 128) -> int:
        free_bytes = self.physical_bytes - self.system_bytes - self.fixed_bytes - self.graph_bytes
        return free_bytes // (padded_length * self.token_bytes)

    def _refusal(self, missing_bytes: int) -> str:
        allowed_gb = self.high_watermark_ratio * self.recommended_bytes / GIB
        return (
            f"MPS backend out of memory (MPS allocated: {self.driver_bytes / GIB:.2f} GB, other "
            f"allocations: 0 bytes, max allowed: {allowed_gb:.2f} GB). Tried to allocate "
            f"{missing_bytes / MIB:.2f} MiB on shared pool. Use "
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations "
            "(may cause system failure)."
        )
