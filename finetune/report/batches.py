"""The charts of a search for batch sizes."""

from collections.abc import Sequence

from finetune.batch_finder.results import BatchResult
from finetune.report.chart import ANY, Axis, Chart, Series, chart_of

SIZES = Axis("batch size", is_log=True)


def draw_batches(results: Sequence[BatchResult]) -> list[Chart]:
    """Return peak memory and speed of the trials that fitted, as far as they are known.

    They are of the part that trains, not of feature extraction. The memory budgets and the
    recommended batch sizes are guides.
    """
    peaks, speeds, budgets, recommended = [], [], {}, []
    for result in results:
        name = f"{result.device}, {result.mode}, {result.padded_length} tokens"
        part = result.trials[-1].part if result.trials else None
        trials = [trial for trial in result.trials if trial.part == part]
        memory = [(one.batch_size, one.peak_bytes / 2**30) for one in trials if one.peak_bytes]
        speed = [(one.batch_size, one.examples_per_second or 0.0) for one in trials]
        peaks.append(Series(name, sorted(memory)))
        speeds.append(Series(name, sorted(point for point in speed if point[1])))
        if result.budget_bytes:
            budget = [(ANY, result.budget_bytes / 2**30)]
            budgets[result.device] = Series(f"budget on {result.device}", budget, "guide")
        if result.recommended:
            title = f"{name}: {result.recommended:,} is recommended"
            recommended.append(Series(title, [(result.recommended, ANY)], "guide"))
    gib, per_second = (Axis(unit, low=0.0) for unit in ("GiB", "examples/s"))
    return [
        *chart_of("Peak memory, GiB", [*peaks, *budgets.values()], SIZES, gib),
        *chart_of("Examples a second", [*speeds, *recommended], SIZES, per_second),
    ]
