"""The charts of a search for batch sizes."""

from collections.abc import Sequence

from finetune.batch_finder.results import BatchResult
from finetune.report.chart import Axis, Chart, Points, Series, chart_of

SIZES = Axis("batch size", is_log=True)


def draw_batches(results: Sequence[BatchResult]) -> list[Chart]:
    """Return peak memory and speed of the trials that fitted, as far as they are known.

    The memory budgets and the recommended batch sizes are guides.
    """
    memory = {_name(one): _points(one, "peak_bytes", 2**30) for one in results}
    speed = {_name(one): _points(one, "examples_per_second") for one in results}
    sizes = [size for points in memory.values() for size, _ in points]
    heights = [height for points in speed.values() for _, height in points]
    budgets = [
        Series(f"budget on {device}", [(size, budget / 2**30) for size in _ends(sizes)], "guide")
        for device, budget in dict.fromkeys((one.device, one.budget_bytes) for one in results)
        if budget
    ]
    recommended = [
        Series(
            f"{_name(one)}: {one.recommended:,} is recommended",
            [(one.recommended, height) for height in _ends(heights)],
            "guide",
        )
        for one in results
        if one.recommended
    ]
    peaks, speeds = ([Series(*one) for one in lines.items()] for lines in (memory, speed))
    gib, per_second = (Axis(unit, low=0.0) for unit in ("GiB", "examples/s"))
    return [
        *chart_of("Peak memory, GiB", [*peaks, *budgets], SIZES, gib),
        *chart_of("Examples a second", [*speeds, *recommended], SIZES, per_second),
    ]


def _name(result: BatchResult) -> str:
    return f"{result.device}, {result.mode}, {result.padded_length} tokens"


def _points(result: BatchResult, measure: str, unit: float = 1.0) -> Points:
    """Return a measure of the trials of the part that trains, not of feature extraction."""
    part = result.trials[-1].part if result.trials else None
    trials = [
        one.trial for one in result.trials if one.part == part and getattr(one.trial, measure)
    ]
    return sorted((one.batch_size, getattr(one, measure) / unit) for one in trials)


def _ends(numbers: Sequence[float]) -> tuple[float, ...]:
    return (min(numbers), max(numbers)) if numbers else ()
