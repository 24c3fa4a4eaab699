"""Simulated machines whose memory and speed follow measured curves."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune.batch_finder import search
from finetune.batch_finder.results import Case
from finetune.batch_finder.trials import TrialServer
from finetune.devices.base import Device
from finetune.errors import ModelUnsupportedError
from finetune.events import Trial, emit

MIB = 2**20
GIB = 2**30

# Functions of the batch size, which return bytes or seconds.
Curve = Callable[[int], float]


def rising_from(*, floor: float, base: float, row: float) -> Curve:
    """Return peak memory that is constant for small batches and then linear. Arguments in MiB."""
    return lambda batch_size: MIB * max(floor, base + row * batch_size)


def saturating(*, start: float, row: float) -> Curve:
    """Return a step-time curve: fixed seconds plus seconds per row."""
    return lambda batch_size: start + row * batch_size


# Measured memory of BERT-base with 128 tokens in bf16 on an H200.
BERT_ON_H200 = rising_from(floor=2160, base=1962, row=49.5)
BERT_SECONDS_ON_H200 = saturating(start=0.016, row=0.0016)


@dataclass
class SimulatedMachine:
    """A device with dedicated memory, or a process with a memory limit.

    Batches above ``capacity_share`` of the budget fail. A new process takes time to start.
    """

    peak_bytes: Curve = BERT_ON_H200
    step_seconds: Curve = BERT_SECONDS_ON_H200
    budget_bytes: int = 8 * GIB
    capacity_share: float = 1.0
    start_seconds: float = 8.0
    fresh_sizes: list[int] = field(init=False, default_factory=list)

    def fits(self, batch_size: int) -> bool:
        return self.peak_bytes(batch_size) <= self.capacity_share * self.budget_bytes

    def largest_fitting(self) -> int:
        """Return the largest size that fits, if memory never falls with the batch size."""
        low, high = 0, 100_001
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def examples_per_second(self, batch_size: int) -> float:
        return batch_size / self.step_seconds(batch_size)

    def best_examples_per_second(self) -> float:
        """Return the highest speed of all sizes that fit."""
        largest = self.largest_fitting()
        step = max(1, largest // 500)
        return max(self.examples_per_second(size) for size in range(1, largest + 1, step))

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        if new_process:
            self.fresh_sizes.append(batch_size)
        seconds = 3.5 * self.step_seconds(batch_size) + self.start_seconds * new_process
        if not self.fits(batch_size):
            return Trial(batch_size, "too_big", seconds=seconds / 4)
        return Trial(
            batch_size,
            "fits",
            peak_bytes=round(self.peak_bytes(batch_size)),
            examples_per_second=self.examples_per_second(batch_size),
            seconds=seconds,
        )


@dataclass
class SimulatedRunner:
    """Replaces ``TrialRunner`` with simulated machines, without child processes.

    Args:
        machine: The machine of each trial.
        machines: Machines that replace it for a part of the model (``Case.part``).
        with_checkpointing: The machine for gradient checkpointing, or None for ``machine``.
        can_split: Whether models can be split at the first trainable layer.
        cases: The cases searched so far, in order.
    """

    machine: SimulatedMachine = field(default_factory=SimulatedMachine)
    machines: dict[str, SimulatedMachine] = field(default_factory=dict)
    with_checkpointing: SimulatedMachine | None = None
    can_split: bool = True
    cases: list[Case] = field(default_factory=list)

    def __call__(
        self, case: Case, device: Device, _: TrialServer, *, limit_bytes: int | None, **__: Any
    ) -> "SimulatedRunner":
        self.cases.append(case)
        if case.gradient_checkpointing:
            self.machine = self.with_checkpointing or self.machine
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
        part = self.cases[-1].part
        if part != "whole" and not self.can_split:
            raise ModelUnsupportedError("the frozen layers of Model can't be split off", remedy="-")
        machine = self.machines.get(part, self.machine)
        trial = replace(machine.run(batch_size, new_process=new_process), part=part)
        emit(trial)
        return trial


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimulatedRunner:
    """A simulated machine for searches. Tests can change it."""
    simulated = SimulatedRunner()
    monkeypatch.setattr(search, "TrialRunner", simulated)
    return simulated


@dataclass
class UnifiedMemoryMac:
    """A Mac whose GPU shares system memory, and which swaps before allocations fail.

    Buffers are kept per shape, and only ``empty_cache`` frees them. Above the physical memory, a
    step is ten times slower. Allocations fail at 1.7 times the recommended memory, which Metal sets
    to 2/3 of 8 GB, and to 78% of 48 GB.

    Args:
        system_bytes: Memory of macOS and other programs.
        live_bytes: Weights, gradients and optimizer state.
        token_bytes: Activations per token.
        reports_swap: Whether trials report swapping, or are only slow.
    """

    physical_bytes: int = 8 * GIB
    system_bytes: int = int(2.5 * GIB)
    recommended_share: float = 2 / 3
    live_bytes: int = int(1.8 * GIB)
    token_bytes: int = int(0.45 * MIB)
    reports_swap: bool = True
    peak_bytes: int = field(init=False, default=0)
    buffer_bytes: dict[tuple[int, int], int] = field(init=False, default_factory=dict)

    @property
    def recommended_bytes(self) -> int:
        return int(self.recommended_share * self.physical_bytes)

    @property
    def driver_bytes(self) -> int:
        return self.live_bytes + sum(self.buffer_bytes.values())

    @property
    def swap_bytes(self) -> int:
        return max(0, self.driver_bytes + self.system_bytes - self.physical_bytes)

    def take_step(self, rows: int, padded_length: int) -> float:
        """Take one step and return its seconds. Raise MemoryError if memory runs out."""
        shape, needed_bytes = (rows, padded_length), rows * padded_length * self.token_bytes
        missing_bytes = 0 if shape in self.buffer_bytes else needed_bytes
        if self.driver_bytes + missing_bytes > 1.4 * self.recommended_bytes:
            self.empty_cache()
            missing_bytes = needed_bytes
        if self.driver_bytes + missing_bytes > 1.7 * self.recommended_bytes:
            raise MemoryError
        self.buffer_bytes[shape] = needed_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + needed_bytes)
        slowdown = 1 + 11 * min(1.0, self.swap_bytes / (0.1 * self.physical_bytes))
        return (0.2 + 0.003 * rows * padded_length) * slowdown

    def empty_cache(self) -> None:
        self.buffer_bytes.clear()

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        """Take three steps of 128 tokens in a new process."""
        mac = replace(self)
        try:
            *_, seconds = [mac.take_step(batch_size, 128) for _ in range(3)]
        except MemoryError:
            return Trial(batch_size, "too_big")
        if self.reports_swap and mac.swap_bytes > 0:
            return Trial(batch_size, "too_big", reason="the machine swapped")
        return Trial(batch_size, "fits", mac.driver_bytes, batch_size / seconds, 3 * seconds)

    def largest_without_swap(self) -> int:
        free_bytes = self.physical_bytes - self.system_bytes - self.live_bytes
        return free_bytes // (128 * self.token_bytes)
