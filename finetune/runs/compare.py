"""Finished runs side by side: metrics, options, and rows that one gets right and another wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import OPTIONS
from finetune.errors import DataDiffers, NotARun, UsageError
from finetune.evaluation.statistics import (
    Interval,
    bootstrap,
    mcnemar_p_value,
    paired_differences,
)
from finetune.runs.finished import FinishedRun
from finetune.runs.results import best_of
from finetune.tasks.base import Task
from finetune.tasks.scores import Scores
from finetune.tasks.tables import text_of

SCHEMA_VERSION = 1
Baseline = Literal["first", "best"]
# Each run has its own folder.
_OPTIONS_LEFT_OUT = frozenset({"output_dir", "overwrite"})


@dataclass(frozen=True)
class DifferingRow:
    """A test row that one of two runs answers better.

    Args:
        row: Its number in the test split, from 0.
        text: Its text, or both texts of a pair.
        label: What is true: a class, classes or a number.
        baseline: What the baseline says.
        run: What the other run says.
    """

    row: int
    text: str
    label: Any
    baseline: Any
    run: Any


@dataclass(frozen=True)
class Versus:
    """A run against the baseline.

    Args:
        differences: Of each metric, the run's minus the baseline's, with a paired interval.
        better: Rows that the run has right and the baseline wrong; of numbers, where it is nearer.
        worse: Rows that the baseline has right and the run wrong.
        p_value: Of McNemar's exact test, in 0..1; None for numbers.
        better_rows: Those where the runs differ most.
        worse_rows: Likewise.
    """

    differences: Mapping[str, Interval]
    better: int
    worse: int
    p_value: float | None
    better_rows: Sequence[DifferingRow]
    worse_rows: Sequence[DifferingRow]


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs; ``versus`` is None for the baseline."""

    name: str
    path: str
    test: Scores
    versus: Versus | None


@dataclass(frozen=True)
class Comparison:
    """Runs on the same test rows.

    Args:
        task: What the labels are.
        samples: Rows of the test split.
        baseline: Name of the run that the others are compared with.
        runs: In the order in which they were given.
        options: Those that differ, with the value of each run.
    """

    task: Task
    samples: int
    baseline: str
    runs: Sequence[ComparedRun]
    options: Mapping[str, Sequence[Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune compare --json`` prints."""
        runs = [
            {"name": run.name, "path": run.path, "metrics": run.test.metrics,
             "versus_baseline": run.versus and asdict(run.versus)}
            for run in self.runs
        ]  # fmt: skip
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            "samples": self.samples,
            "baseline": self.baseline,
            "runs": runs,
            "options": self.options,
        }


def compare_runs(
    runs: Sequence[FinishedRun], *, baseline: Baseline = "first", most_rows: int
) -> Comparison:
    """Compare runs with one of them.

    Args:
        runs: Two at least.
        baseline: ``first`` or, by the validation metric that chose their models, ``best``.
        most_rows: Of differing rows, each way.

    Raises:
        UsageError: If there is one run alone, or the best is not known.
        DataDiffers: If they were tested on different rows.
    """
    if len(runs) < 2:
        raise UsageError(
            f"there is nothing to compare {' '.join(str(one.path) for one in runs)} with",
            remedy="name two runs or more, or a folder that contains several",
        )
    names = _name_runs(runs)
    _check_test_rows(runs, names)
    against = runs[0] if baseline == "first" else best_run(runs)
    pairing = _Pairing(runs, against, most_rows)
    compared = [
        ComparedRun(name, str(run.path), run.results.test, pairing.versus(run))
        for name, run in zip(names, runs, strict=True)
    ]
    return Comparison(
        task=against.results.task,
        samples=len(against.predictions),
        baseline=names[runs.index(against)],
        runs=compared,
        options=_differing_options(runs),
    )


def best_run(runs: Sequence[FinishedRun]) -> FinishedRun:
    """Return the run with the best model by the validation metric that chose it.

    Raises:
        UsageError: If a run has no validation split.
    """
    metric = runs[0].config.training.metric_for_best_model
    best = best_of({run: run.results for run in runs}, metric)
    if best is None:
        raise UsageError(
            "which run is the best is not known: not all have a validation split",
            remedy="compare with the first, --baseline first",
        )
    return best


def _name_runs(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the name of each run's folder, or its path where two have the same name."""
    names = [run.path.resolve().name for run in runs]
    return names if len({*names}) == len(names) else [str(run.path) for run in runs]


def _check_test_rows(runs: Sequence[FinishedRun], names: Sequence[str]) -> None:
    groups: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        groups.setdefault(run.test_digest, []).append(name)
    if len(groups) > 1:
        raise DataDiffers(
            "the runs were tested on different rows: "
            + " | ".join(", ".join(own) for own in groups.values()),
            remedy="compare runs of one of these groups, or make runs with the same data, test "
            "split, --task and --split-seed",
        )
    labels = [[row.get("label") for row in run.predictions] for run in runs]
    for run, own in zip(runs, labels, strict=True):
        if own != labels[0]:
            raise NotARun(
                f"the predictions.jsonl of {run.path} is not of the test rows in its manifest.json",
                remedy="restore the file, or make the run again",
            )


def _differing_options(runs: Sequence[FinishedRun]) -> dict[str, list[Any]]:
    values = {
        option.name: [option.value_in(run.config) for run in runs]
        for option in OPTIONS.values()
        if option.name not in _OPTIONS_LEFT_OUT
    }
    return {option: own for option, own in values.items() if any(value != own[0] for value in own)}


@dataclass(frozen=True)
class _Pairing:
    """Each of the runs against one of them."""

    runs: Sequence[FinishedRun]
    baseline: FinishedRun
    most_rows: int

    @cached_property
    def _resampled(self) -> list[dict[str, NDArray[np.float64]]]:
        functions = [run.weighted_metrics for run in self.runs]
        return bootstrap(functions, rows=len(self.baseline.predictions))

    def versus(self, run: FinishedRun) -> Versus | None:
        """Compare a run with the baseline; None if it is the baseline."""
        if run is self.baseline:
            return None
        task = self.baseline.results.task
        errors, base = (task.row_errors(one.predictions) for one in (run, self.baseline))
        is_better, is_worse = errors < base, errors > base
        if task.is_right_or_wrong:
            is_better, is_worse = (errors == 0) & (base > 0), (errors > 0) & (base == 0)
        better, worse = (int(np.count_nonzero(mask)) for mask in (is_better, is_worse))
        gaps = np.abs(errors - base)
        return Versus(
            differences=self._differences(run),
            better=better,
            worse=worse,
            p_value=mcnemar_p_value(better, worse) if task.is_right_or_wrong else None,
            better_rows=self._differing_rows(run, np.where(is_better, gaps, 0)),
            worse_rows=self._differing_rows(run, np.where(is_worse, gaps, 0)),
        )

    def _differences(self, run: FinishedRun) -> dict[str, Interval]:
        of_run, of_baseline = (one.results.test.metrics for one in (run, self.baseline))
        return paired_differences(
            self._resampled[self.runs.index(run)],
            self._resampled[self.runs.index(self.baseline)],
            found={name: value - of_baseline[name] for name, value in of_run.items()},
        )

    def _differing_rows(self, run: FinishedRun, gaps: NDArray[np.float64]) -> list[DifferingRow]:
        """Return the rows with the largest gaps above 0, the first of equals first."""
        order = np.argsort(-gaps, kind="stable")[: self.most_rows]
        return [
            DifferingRow(
                row,
                text_of(self.baseline.predictions[row]),
                self.baseline.predictions[row]["label"],
                self.baseline.predictions[row]["predicted"],
                run.predictions[row]["predicted"],
            )
            for row in order[gaps[order] > 0].tolist()
        ]
