"""Searches for the batch sizes of a model on one device, or confirms earlier results.

The search tries 4 examples and grows until two trials give a line of memory. Then it jumps to 0.985
of the predicted size, brackets the largest size that fits to 2%, and confirms it in a new process.
Memory is fragmented, so a batch often fails although 1 or 2% of the budget should be free.

A trial takes a few steps at one padded length, a run takes thousands at many lengths. On a CPU, 50
steps of mixed lengths took 20% more memory per example. So the recommended size is the fastest
within 0.75 of the size at which memory runs out.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from finetune.batch_finder.results import Case, Part, Result
from finetune.batch_finder.trials import TrialRunner, TrialServer
from finetune.config.load import parse_size
from finetune.config.schema import SearchConfig
from finetune.devices.base import Device
from finetune.devices.host import available_bytes, gibibytes
from finetune.distributed import read_launch
from finetune.errors import BatchDoesNotFitError, FinetuneError, ModelUnsupportedError
from finetune.events import Info, Trial, WarningMessage, emit
from finetune.files import WRITTEN_BY, read_cache_json, write_cache_json
from finetune.model.tensor_store import key_of

FIRST_SIZE, TARGET, TOLERANCE, SAFE_SIZE = 4, 0.985, 0.02, 0.75
# After this many trials, only the largest size is confirmed.
MAX_TRIALS = 8
# If the predicted size fails, the search steps down by this fraction, then by twice that.
STEP_DOWN = 0.02
# Predictions are unreliable if a proportional estimate is below this fraction of them.
FAR = 0.75
# Sizes within this fraction of the best speed count as fastest.
FASTEST = 0.97
# A trial takes two or three steps and an evaluation, about the time of this many steps.
STEPS_PER_TRIAL = 4
# If a device swaps, a size with less than this fraction of the speed of a smaller size is too big.
MIN_SPEED = 0.5
# The minimum ratio of two sizes for a slope.
MIN_SPAN = 1.25
# Free memory fluctuates. A budget larger by this factor is worth another search.
MORE_BUDGET = 1.05
# Results depend on these packages. This package decides what is recommended.
PACKAGES = ("finetune-mps", "torch", "transformers", "accelerate")
PARTS: dict[Part, str] = {
    "whole": "",
    "features": ", feature extraction",
    "trainable": ", trainable layers",
}


class MemoryLine(NamedTuple):
    """Peak memory by batch size: ``max(floor, base + example * batch_size)``.

    The floor is the step of the optimizer, the peak of small batches. BERT-base with 128 tokens in
    bf16 on an H200 takes 2,160 MiB for 1 to 4 examples, and 49.5 MiB for each further example.
    """

    floor_bytes: float
    base_bytes: float
    example_bytes: float

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the peak memory of a batch."""
        return max(self.floor_bytes, self.base_bytes + self.example_bytes * batch_size)

    def largest_batch(self, budget_bytes: float) -> int | None:
        """Predict the largest batch within a budget, or return None if no growth was seen.

        >>> MemoryLine(floor_bytes=50, base_bytes=20, example_bytes=10).largest_batch(99)
        7
        """
        if self.floor_bytes > budget_bytes:
            return 0
        if self.example_bytes == 0:
            return None
        return max(0, math.floor((budget_bytes - self.base_bytes) / self.example_bytes))


def fit_memory(peaks: Mapping[int, int]) -> MemoryLine:
    """Fit peak bytes by batch size, through the two largest sizes that are far enough apart."""
    smallest, largest = min(peaks), max(peaks)
    size = max((size for size in peaks if size * MIN_SPAN <= largest), default=0)
    growth_bytes = peaks[largest] - peaks[size] if size else 0
    slope = max(0.0, growth_bytes / (largest - size))
    return MemoryLine(peaks[smallest], peaks[largest] - slope * largest, slope)


def fastest_size(speeds: Mapping[int, float]) -> int:
    """Return the smallest size whose speed, in examples per second, is within 3% of the best.

    >>> fastest_size({8: 70.0, 32: 98.0, 128: 100.0})
    32
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= FASTEST * best)


@dataclass
class Search:
    """Finds the largest batch size that fits, confirmed in a new process, and the fastest.

    Two trials of the same size can disagree. A size that failed once is never returned.

    Args:
        run: Tries a batch size, in a new process if ``new_process`` is true.
        first: Size to start with, or None for a small one.
        time_limit: Seconds. If a result exists, a trial that would end later is skipped.
        slows_down: Whether the device swaps instead of rejecting an allocation.
    """

    run: Callable[..., Trial]
    budget_bytes: int
    limit: int
    first: int | None = None
    time_limit: float = math.inf
    slows_down: bool = False
    trials: list[Trial] = field(default_factory=list)

    def result(self) -> Result:
        """Run all trials."""
        confirmed: set[int] = set()
        self._review()
        while following := self._next_trial(confirmed):
            size, new_process = following
            self.trials.append(self.run(size, new_process=new_process))
            if new_process:
                confirmed.add(size)
            self._review()
        high = min(self.too_big, default=self.limit + 1)
        is_late = self.is_late or len(self.failed) > len(self.too_big)
        predicted = None
        if is_late and self.predicted is not None:
            predicted = max(self.largest, min(self.predicted, high - 1))
        safe = {size: speed for size, speed in self.speeds.items() if size <= self.safe_size}
        return Result(
            largest=self.largest,
            first_failed=min(self.too_big, default=None),
            predicted_largest=predicted,
            fastest=fastest_size(self.speeds),
            recommended=fastest_size(safe) if safe else min(self.speeds),
            trials=tuple(self.trials),
            budget_bytes=self.budget_bytes,
            peak_bytes=self.passed[self.largest].peak_bytes,
        )

    def _review(self) -> None:
        """Evaluate the trials so far. Raise an error if the last trial ends the search."""
        if self.slows_down:
            self.trials = [self._judge_speed(trial) for trial in self.trials]
        self.too_big = {trial.batch_size for trial in self.trials if trial.status == "too_big"}
        self.failed = {trial.batch_size for trial in self.trials if trial.status != "fits"}
        # The last trial of each size that never failed, in ascending order.
        last_trials = {trial.batch_size: trial for trial in self.trials}
        self.passed = {size: last_trials[size] for size in sorted(last_trials.keys() - self.failed)}
        self.speeds = {
            size: trial.examples_per_second or 0.0 for size, trial in self.passed.items()
        }
        self.largest = max(self.passed, default=0)
        self.tolerance = max(1, int(TOLERANCE * self.largest))
        # The size at which memory runs out, or None while no slope is known.
        peaks = {size: trial.peak_bytes for size, trial in self.passed.items() if trial.peak_bytes}
        self.predicted = fit_memory(peaks).largest_batch(self.budget_bytes) if peaks else None
        # The largest size, tried or not, that leaves enough memory free.
        end = min(self.too_big, default=math.inf if self.predicted is None else self.predicted)
        self.safe_size = max(1, math.floor(min(SAFE_SIZE * end, self.limit)))
        # Whether another size would have taken too long.
        self.is_late = False
        if self.trials:
            self._raise_if_hopeless(self.trials[-1])

    def _raise_if_hopeless(self, trial: Trial) -> None:
        if trial.status == "failed" or (trial.status == "timed_out" and trial.batch_size == 1):
            raise FinetuneError(
                f"training at batch size {trial.batch_size} failed: {trial.reason}",
                remedy="run finetune doctor, raise --time-limit, or lower --max-length; memory is "
                "not the cause",
            )
        if not self.largest and trial.batch_size == 1:
            raise BatchDoesNotFitError(
                f"not even a single example fits in memory: {trial.reason}",
                remedy="lower --max-length, use --gradient-checkpointing or --freeze-core, or "
                "raise --memory",
            )

    def _judge_speed(self, trial: Trial) -> Trial:
        """Mark a trial as too big if it fit only because the system swapped."""
        smaller = [other for other in self.trials if other.batch_size < trial.batch_size]
        best = max((other.examples_per_second or 0.0 for other in smaller), default=0.0)
        speed = trial.examples_per_second or 0.0
        if trial.status != "fits" or speed >= MIN_SPEED * best:
            return trial
        reason = f"it runs at {speed / best:.0%} of the speed of a smaller batch"
        return replace(trial, status="too_big", reason=reason)

    def _next_trial(self, confirmed: set[int]) -> tuple[int, bool] | None:
        """Return the next size and whether it needs a new process, or None at the end."""
        size, safe_size = self._next_size(), self.safe_size
        is_safe_size_needed = (
            self.passed
            and safe_size not in {trial.batch_size for trial in self.trials}
            and fastest_size(self.speeds) > safe_size
            and not any(SAFE_SIZE * safe_size <= size <= safe_size for size in self.passed)
        )
        if size is not None and len(self.trials) < MAX_TRIALS - bool(is_safe_size_needed):
            # While the search grows, half of the time is kept for the confirmation. Later, any
            # size may be the largest, so its trial also confirms it.
            affordable = self._affordable_size(0.5 if self.predicted is None else 1.0)
            self.is_late = affordable < min(size, self.largest + self.tolerance)
            if not self.is_late:
                size = min(size, affordable)
                return size, self.predicted is not None or size in (affordable, self.limit)
        if self.largest not in confirmed:
            return max(1, self.largest), True
        is_affordable = safe_size <= self._affordable_size(1.0) and len(self.trials) < MAX_TRIALS
        return (safe_size, False) if is_safe_size_needed and is_affordable else None

    def _next_size(self) -> int | None:
        """Return the next size to try, or None once the largest is bracketed."""
        low = self.largest
        if not low:
            # If memory is swapped, only the speed of a smaller size reveals that a larger one
            # swaps.
            is_small = self.trials or self.slows_down
            return 1 if is_small else min(self.first or FIRST_SIZE, self.limit)
        high = min(self.failed, default=self.limit + 1)
        if low == self.limit or (self.failed and high - low <= self.tolerance):
            return None
        peak_bytes = self.passed[low].peak_bytes or self.budget_bytes
        # This many fit even if the examples caused all of the peak so far.
        proportional = max(low, low * self.budget_bytes // peak_bytes)
        if self.predicted is None:
            # It fits if examples took at most half of the peak so far, or if twice as many fit.
            size = max(2 * low, 2 * proportional - low)
        else:
            # If a size one tolerance larger fails, the largest size is bracketed. Beyond a
            # prediction that was too low, the distance grows.
            target = math.ceil(TARGET * self.predicted)
            size = max(target, low + max(self.tolerance, low - target))
        if self.failed and size >= high:
            # A size failed that the line predicted to fit. If the line is unreliable, bisect.
            step_down = 1 - STEP_DOWN * 2 ** (len(self.failed) - 1)
            size = max((low + high) // 2, int(step_down * high))
            if self.predicted is None or proportional < FAR * high:
                size = math.isqrt(proportional * high)
        return min(max(size, low + 1), high - 1)

    def _affordable_size(self, fraction: float) -> int:
        """Predict the largest size whose trial ends within a fraction of the time left."""
        if not self.passed:
            return self.limit
        last = self.passed[self.largest]
        seconds = fraction * (self.time_limit - sum(trial.seconds for trial in self.trials))
        examples = (seconds - last.seconds) * self.speeds[self.largest] / STEPS_PER_TRIAL
        return math.floor(min(self.largest + examples, 2 * self.limit))


def find(
    case: Case,
    device: Device,
    options: SearchConfig,
    server: TrialServer,
    *,
    limit: int,
    first: int | None = None,
    cache: Path | None = None,
    is_fresh: bool = False,
) -> Result:
    """Search for the batch sizes of a case, or confirm an earlier result with one trial.

    ``first`` is None to start with a small batch size. ``cache`` is a folder with the results of
    earlier searches, which a fresh search doesn't read.
    """
    started = time.perf_counter()
    max_correct = device.shapes.max_examples(padded_length=case.padded_length)
    limit = min(limit, max_correct or limit)
    first = first and min(first, limit)
    limit_bytes = _limit_bytes(options, device)
    file = cache and cache / f"{_key(case, device, [limit, first, asdict(options)])}.json"
    cached = None
    if file and not is_fresh:
        with suppress(OSError, ValueError):
            cached = TypeAdapter(Result).validate_python(read_cache_json(file))
    with TrialRunner(
        case, device, server, limit_bytes=limit_bytes, timeout_seconds=options.time_limit
    ) as runner:
        budget_bytes = runner.budget_bytes()
        if cached:
            has_more = budget_bytes > MORE_BUDGET * (cached.budget_bytes or 0)
            if cached.is_short_of_memory and has_more:
                first = cached.largest
            elif (trial := runner.run(cached.recommended, new_process=True)).status == "fits":
                return replace(cached, budget_bytes=budget_bytes, trials=(trial,))
        try:
            left_seconds = options.time_limit - (time.perf_counter() - started)
            slows_down = device.memory.swaps
            result = Search(
                runner.run, budget_bytes, limit, first, left_seconds, slows_down
            ).result()
        except BatchDoesNotFitError as error:
            total_bytes, free_bytes = device.memory.total_bytes(), device.memory.budget_bytes(None)
            if 2 * free_bytes > total_bytes or (limit_bytes and limit_bytes < free_bytes):
                raise
            others = f"another process uses {gibibytes(total_bytes - free_bytes)}"
            raise BatchDoesNotFitError(
                f"{error.message}: {others}", remedy="close it, and run the command again"
            ) from None
    if file:
        write_cache_json(file, asdict(result) | WRITTEN_BY)
    return result


def find_parts(
    case: Case, find_part: Callable[[Case], Result], *, stores_features: bool, action: str
) -> Result:
    """Find the batch sizes of all parts of a model, or of the whole model if it can't be split.

    ``action``, such as ``searching on cpu``, starts a message about each part.
    """
    started = time.perf_counter()
    results: dict[Part, Result] = {}
    parts: tuple[Part, ...] = ("features", "trainable") if stores_features else ("whole",)
    for part in parts:
        emit(Info(f"{action}: {case.mode}{PARTS[part]}, {case.padded_length} tokens"))
        try:
            results[part] = find_part(replace(case, part=part))
        except BatchDoesNotFitError as error:
            emit(WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupportedError as error:
            if part == "whole":
                raise
            emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
            return find_parts(case, find_part, stores_features=False, action=action)
    fits = len(results) == len(parts)
    peaks = [result.peak_bytes for result in results.values() if result.peak_bytes]
    features = results.get("features", Result())
    return replace(
        results[parts[-1]] if fits else Result(),
        **case.identity(),
        stores_features=stores_features,
        budget_bytes=next((result.budget_bytes for result in results.values()), None),
        features_batch_size=(features.largest if features.machine else features.recommended)
        or None,
        peak_bytes=max(peaks) if fits and peaks else None,
        trials=tuple(trial for result in results.values() for trial in result.trials),
        seconds=time.perf_counter() - started,
    )


def memory_limit_bytes(options: SearchConfig) -> int | None:
    """Return the user's memory limit, or None."""
    return None if options.memory is None else parse_size(options.memory, source="--memory")


def _limit_bytes(options: SearchConfig, device: Device) -> int | None:
    """Return the memory limit of a trial. Ranks on one host divide its memory."""
    limit, ranks = memory_limit_bytes(options), read_launch().local_world_size
    if ranks == 1 or not device.memory.is_shared:
        return limit
    share = available_bytes() // ranks
    return share if limit is None else min(limit, share)


def _key(case: Case, device: Device, bounds: object) -> str:
    """Return a key of everything that a result depends on except the budget."""
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    ingredients = [asdict(case), device.description, versions, bounds]
    return key_of([json.dumps(ingredients, sort_keys=True)])
