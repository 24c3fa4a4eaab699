"""The charts of a search for batch sizes."""

from collections.abc import Sequence

from finetune.batch_finder.results import BatchResult
from finetune.report.chart import Axis, Chart, Points, Series, chart_of

SIZES = Axis("batch size", is_log=True)


def draw_batches(results: Sequence[BatchResult]) -> list[Chart]:
    """Return peak memory and speed of the trials that fitted, as far as they are known.

    The memory budgets and the recommended batch sizes are guides.
    """
    peaks = [Series(_name(result), _points(result, "peak_bytes", 2**30)) for result in results]
    speeds = [Series(_name(result), _points(result, "examples_per_second")) for result in results]
    sizes = [size for series in peaks for size, _ in series.points]
    heights = [height for series in speeds for _, height in series.points]
    budgets = {result.device: result.budget_bytes for result in results if result.budget_bytes}
    limits = [
        Series(f"budget on {device}", [(size, budget / 2**30) for size in _ends(sizes)], "guide")
        for device, budget in budgets.items()
    ]
    recommended = [
        Series(
            f"{_name(result)}: {result.recommended:,} is recommended",
            [(result.recommended, height) for height in _ends(heights)],
            "guide",
        )
        for result in results
        if result.recommended
    ]
    gib, per_second = (Axis(unit, low=0.0) for unit in ("GiB", "examples/s"))
    return [
        *chart_of("Peak memory, GiB", [*peaks, *limits], SIZES, gib),
        *chart_of("Examples a second", [*speeds, *recommended], SIZES, per_second),
    ]


def _name(result: BatchResult) -> str:
    return f"{result.device}, {result.mode}, {result.padded_length} tokens"


def _points(result: BatchResult, measure: str, unit: float = 1.0) -> Points:
    """Return a measure of the trials of the part that trains, not of feature extraction."""
    part = result.trials[-1].part if result.trials else None
    trials = [one for one in result.trials if one.part == part]
    values = [(trial.batch_size, getattr(trial, measure)) for trial in trials]
    return sorted((size, value / unit) for size, value in values if value)


def _ends(numbers: Sequence[float]) -> tuple[float, ...]:
    return (min(numbers), max(numbers)) if numbers else ()
