"""A comparison of three runs that never were, with all that its page can show."""

from dataclasses import replace

from report.example_run import example_results

from finetune.evaluation.statistics import Interval
from finetune.runs.compare import ComparedGroup, ComparedRun, Comparison, DifferingRow, Versus


def example_comparison(*, text: str, name: str, value: str) -> Comparison:
    """Return a comparison.

    Args:
        text: Of the rows that differ.
        name: Of a run.
        value: Of an option that differs, and of a class.
    """
    results = example_results(other=value)
    rows = [DifferingRow(number, text, "DESC", value, "DESC") for number in range(3)]
    better = Versus(
        differences={"accuracy": Interval(0.012, -0.004, 0.029)},
        better=1204,
        worse=3,
        p_value=0.012,
        better_rows=rows,
        worse_rows=[replace(row, baseline="DESC", run=value) for row in rows],
    )
    run = ComparedRun(
        "trec-minilm-full", "runs/trec-minilm-full", 1, results.test.metrics,
        Interval(0.75, 0.3, 0.95), None, 83.0, 22_700_000, 0.5,
    )  # fmt: skip
    runs = [
        run,
        replace(run, name="trec-minilm-head", versus_baseline=better),
        replace(
            run, name=name, seeds=2, spread=0.01, versus_baseline=replace(better, worse_rows=[])
        ),
    ]
    options = {"learning_rate": [2e-05, 1e-3, 2e-05], "data": ["trec", "trec", value]}
    verdict = f"Take {name}: the difference to trec-minilm-head is more than chance."
    group = ComparedGroup(results.task, "trec", 1207, run.name, runs, options, verdict)
    return Comparison([group])
