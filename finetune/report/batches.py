"""The charts of a search for batch sizes."""

from collections.abc import Sequence

from finetune.batch_finder.results import BatchResult
from finetune.events import Trial
from finetune.report.chart import Axis, Chart, Series, chart_of

_SIZES = Axis("batch size", is_log=True)


def draw_batches(results: Sequence[BatchResult]) -> list[Chart]:
    """Return the peak memory and the speed of the trials that fitted, as far as they are known."""
    return [*_draw_memory(results), *_draw_speed(results)]


def _draw_memory(results: Sequence[BatchResult]) -> list[Chart]:
    """Return the peak memory by batch size, with the budget of each device as a guide."""
    lines = []
    for result in results:
        peaks = [(one.batch_size, one.peak_bytes) for one in _trials(result)]
        lines.append(Series(_name(result), [(size, peak / 2**30) for size, peak in peaks if peak]))
    sizes = [size for line in lines for size, _ in line.points]
    budgets = [
        Series(f"budget on {device}", [(size, budget / 2**30) for size in _ends(sizes)], "guide")
        for device, budget in dict.fromkeys((one.device, one.budget_bytes) for one in results)
        if budget
    ]
    return chart_of("Peak memory, GiB", [*lines, *budgets], _SIZES, Axis("GiB", low=0.0))


def _draw_speed(results: Sequence[BatchResult]) -> list[Chart]:
    """Return the examples a second by batch size, with the recommended sizes as guides."""
    lines = []
    for result in results:
        speeds = [(one.batch_size, one.examples_per_second) for one in _trials(result)]
        lines.append(Series(_name(result), [(size, speed) for size, speed in speeds if speed]))
    heights = [height for line in lines for _, height in line.points]
    recommended = [
        Series(
            f"{_name(one)}: {one.recommended:,} is recommended",
            [(one.recommended, height) for height in _ends(heights)],
            "guide",
        )
        for one in results
        if one.recommended
    ]
    speed = Axis("examples/s", low=0.0)
    return chart_of("Examples a second", [*lines, *recommended], _SIZES, speed)


def _name(result: BatchResult) -> str:
    return f"{result.device}, {result.mode}, {result.padded_length} tokens"


def _trials(result: BatchResult) -> list[Trial]:
    """Return those of the part that steps are of: feature extraction is another speed."""
    part = result.trials[-1].part if result.trials else None
    trials = (one.trial for one in result.trials if one.part == part)
    return sorted(trials, key=lambda one: one.batch_size)


def _ends(numbers: Sequence[float]) -> tuple[float, ...]:
    return (min(numbers), max(numbers)) if numbers else ()
