import statistics
from dataclasses import replace
from typing import Any

import pytest
from batch_finder.simulated_machines import (
    GIB,
    SimulatedMachine,
    UnifiedMemoryMac,
    rising_from,
    saturating,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.batch_finder.results import Result
from finetune.batch_finder.search import Search
from finetune.errors import BatchDoesNotFitError, FinetuneError
from finetune.events import Trial

# Peak memory (floor, base and row in MiB) and step seconds (fixed and per row). The proportions
# come from transformers of several sizes, lengths and modes.
GPU_MODELS = {
    "base, 128 tokens, bf16": ((2160, 1962, 49.5), (0.016, 0.0016)),
    "base, 16 tokens, bf16": ((2160, 1980, 6), (0.016, 0.0003)),
    "base, 128 tokens, frozen": ((900, 700, 22), (0.008, 0.0007)),
    "large, 512 tokens, fp32": ((6400, 5800, 1400), (0.04, 0.05)),
    "MiniLM, frozen": ((150, 130, 3.1), (0.006, 0.00007)),
    "head only": ((120, 110, 0.09), (0.0012, 0.000001)),
}
GPUS = {
    f"{model}, {cap} GiB": SimulatedMachine(
        peak_bytes=rising_from(floor=floor, base=base, row=row),
        step_seconds=saturating(start=start, row=row_seconds),
        budget_bytes=cap * GIB,
    )
    for cap in (8, 24, 139)
    for model, ((floor, base, row), (start, row_seconds)) in GPU_MODELS.items()
}


def find(run: Any, *, budget_bytes: int = 8 * GIB, limit: int = 100_000, **bounds: Any) -> Result:
    return Search(run, budget_bytes, limit, **bounds).result()


def find_on(machine: SimulatedMachine, **bounds: Any) -> Result:
    return find(machine.run, budget_bytes=machine.budget_bytes, **bounds)


@pytest.mark.parametrize(
    ("capacity_share", "lowest", "most_failures"),
    [(0.98, 0.98, 2), (0.99, 0.98, 2), (1.0, 0.98, 2), (0.95, 0.9, 4), (1.05, 0.9, 4)],
)
def test_few_trials_find_nearly_the_largest_and_fastest_size(
    capacity_share: float, lowest: float, most_failures: int
) -> None:
    counts = []
    for machine in GPUS.values():
        machine = replace(machine, capacity_share=capacity_share)
        result = find_on(machine)
        counts.append(len(result.trials))
        assert lowest <= result.largest / machine.largest_fitting() <= 1
        failures = [trial for trial in result.trials if trial.status == "too_big"]
        assert len(failures) <= most_failures
        speed = machine.examples_per_second(result.fastest or 0)
        assert speed >= 0.96 * machine.best_examples_per_second()
    assert statistics.median(counts) <= (6 if capacity_share in (0.98, 0.99, 1.0) else 8)
    assert max(counts) <= 9


@pytest.mark.parametrize("first", [None, 1, 1000])
def test_error_is_raised_if_a_batch_of_one_does_not_fit(first: int | None) -> None:
    tried: list[int] = []

    def run(batch_size: int, *, new_process: bool = False) -> Trial:
        tried.append(batch_size)
        return Trial(batch_size, "too_big", reason="tried to allocate 8 GiB")

    with pytest.raises(BatchDoesNotFitError, match="not even a single example") as caught:
        find(run, first=first, limit=1000)

    assert "tried to allocate 8 GiB" in caught.value.message
    assert "--max-length" in caught.value.remedy
    assert tried[-1] == 1
    assert len(tried) <= 3


@pytest.mark.parametrize("at_size", [1, 26])
def test_trial_that_fails_without_an_oom_is_an_error(at_size: int) -> None:
    machine = SimulatedMachine()

    def run(batch_size: int, *, new_process: bool = False) -> Trial:
        if batch_size >= at_size:
            return Trial(batch_size, "failed", reason="killed by signal 11 (SIGSEGV)")
        return machine.run(batch_size)

    with pytest.raises(FinetuneError, match=r"killed by signal 11 \(SIGSEGV\)") as caught:
        find(run)

    assert caught.value.exit_code == 1


@pytest.mark.parametrize("time_limit_seconds", [60, 300])
def test_time_limit_ends_the_search_before_memory_runs_out(time_limit_seconds: float) -> None:
    machine = SimulatedMachine(
        peak_bytes=rising_from(floor=0, base=2100, row=61),
        step_seconds=saturating(start=0.6, row=0.7),
        budget_bytes=14 * GIB,
    )
    result = find_on(machine, time_limit=time_limit_seconds)

    assert result.largest < 0.9 * machine.largest_fitting()
    assert result.largest in machine.fresh_sizes
    assert result.predicted_largest == pytest.approx(machine.largest_fitting(), rel=0.1)
    assert result.first_failed is None
    assert sum(trial.seconds for trial in result.trials) <= 1.1 * time_limit_seconds


@pytest.mark.parametrize("reports_swap", [True, False], ids=["reports swap", "only slow"])
@pytest.mark.parametrize("physical_gib", [8, 16, 48])
def test_search_avoids_swap_on_a_mac_that_slows_down_instead_of_failing(
    physical_gib: int, reports_swap: bool
) -> None:
    mac = UnifiedMemoryMac(physical_bytes=physical_gib * GIB, reports_swap=reports_swap)
    budget_bytes = int(1.7 * mac.recommended_bytes)
    result = find(mac.run, budget_bytes=budget_bytes, limit=5000, slows_down=True)

    assert 0.85 <= result.largest / mac.largest_without_swap() <= 1.05
    assert result.recommended <= mac.largest_without_swap()
    assert result.first_failed is not None
    assert len(result.trials) <= 9


STATUSES = st.sampled_from(["fits", "fits", "fits", "too_big", "too_big", "timed_out", "failed"])


@settings(max_examples=250)
@given(
    data=st.data(),
    limit=st.integers(1, 10**6),
    budget_bytes=st.integers(1, 2**40),
    time_limit=st.floats(0, 1e6),
    slows_down=st.booleans(),
)
def test_search_always_ends_soon_with_a_size_that_fits_or_an_error(
    data: st.DataObject, limit: int, budget_bytes: int, time_limit: float, slows_down: bool
) -> None:
    tried: list[Trial] = []
    checked: list[int] = []

    def run(batch_size: int, *, new_process: bool = False) -> Trial:
        assert 1 <= batch_size <= limit
        checked.extend([batch_size] * new_process)
        status = data.draw(STATUSES)
        seconds = data.draw(st.floats(0, 1000))
        trial = Trial(batch_size, status, seconds=seconds)
        if status == "fits":
            peak_bytes = data.draw(st.none() | st.integers(0, 2**41))
            speed = data.draw(st.floats(1e-3, 1e6))
            trial = replace(trial, peak_bytes=peak_bytes, examples_per_second=speed)
        tried.append(trial)
        assert len(tried) <= 12
        return trial

    try:
        result = find(
            run,
            budget_bytes=budget_bytes,
            limit=limit,
            first=data.draw(st.none() | st.integers(1, limit)),
            time_limit=time_limit,
            slows_down=slows_down,
        )
    except FinetuneError:
        assert tried[-1].status != "fits" or slows_down
        return
    passed = {trial.batch_size for trial in tried if trial.status == "fits"}
    failed = {trial.batch_size for trial in tried if trial.status != "fits"}
    assert [trial.batch_size for trial in result.trials] == [trial.batch_size for trial in tried]
    for size in (result.largest, result.fastest, result.recommended):
        assert size in passed - failed
        assert size <= result.largest
    assert result.largest in checked
    assert result.predicted_largest is None or result.largest <= result.predicted_largest <= limit
