"""Finished runs side by side: metrics, options, and rows that one gets right and another wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import OPTIONS, Config
from finetune.errors import DataDiffers, NotARun, UsageError
from finetune.evaluation.statistics import (
    Interval,
    bootstrap,
    mcnemar_p_value,
    percentile_interval,
)
from finetune.events import Emit, WarningMessage
from finetune.files import is_there
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults, best_of, read_results
from finetune.tasks.base import Task
from finetune.tasks.shown import Shown
from finetune.tasks.tables import text_of

SCHEMA_VERSION = 1
Baseline = Literal["first", "best"]
# Each run has its own folder.
_OPTIONS_LEFT_OUT = frozenset({"output_dir", "overwrite"})


@dataclass(frozen=True)
class DifferingRow:
    """A test row that one of two runs predicts better: its number from 0, label and predictions."""

    row: int
    text: str
    label: Any
    baseline: Any
    run: Any


@dataclass(frozen=True)
class Versus:
    """A run against the baseline: metrics minus the baseline's, with paired intervals.

    ``better`` counts rows that only the run has right or, of numbers, where it is nearer; the first
    are those where both differ most. The p-value is of McNemar's exact test, None for numbers.
    """

    differences: Mapping[str, Interval]
    better: int
    worse: int
    p_value: float | None
    better_rows: Sequence[DifferingRow]
    worse_rows: Sequence[DifferingRow]


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs: its test metrics, and how they compare; None for the baseline."""

    name: str
    path: str
    metrics: Mapping[str, float]
    versus_baseline: Versus | None


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Runs on the same test rows; ``options`` are those that differ, with each run's value."""

    task: Task
    samples: int
    baseline: str
    runs: Sequence[ComparedRun]
    options: Mapping[str, Sequence[Any]]

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each run, and how it compares with the baseline."""
        rows: list[dict[str, Any]] = [{"run": run.name, **run.metrics} for run in self.runs]
        for row, run in zip(rows, self.runs, strict=True):
            if one := run.versus_baseline:
                row |= {"better": one.better, "worse": one.worse, "p_value": one.p_value}
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune compare --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            "samples": self.samples,
            "baseline": self.baseline,
            "runs": [asdict(run) for run in self.runs],
            "options": self.options,
        }


@dataclass(frozen=True, eq=False)
class _FinishedRun:
    """What a finished run has left: ``resampled`` are metrics of resampled test rows."""

    name: str
    path: Path
    config: Config
    results: RunResults
    test_digest: str
    predictions: Sequence[Mapping[str, Any]]
    resampled: Mapping[str, NDArray[np.float64]]

    @classmethod
    def read(cls, folder: RunFolder, name: str) -> "_FinishedRun":
        results = read_results(folder)

        def resample(rows: list[Any]) -> tuple[list[Any], dict[str, NDArray[np.float64]]]:
            if len(rows) != results.test.samples:
                raise ValueError(f"{len(rows)} rows, and {results.test.samples} were tested")
            return rows, bootstrap(results.task.weighted_metrics(rows), rows=len(rows))

        digest = folder.read(folder.manifest_file, lambda content: str(content["splits"]["test"]))
        rows, resampled = folder.read(folder.predictions_file, resample)
        return cls(name, folder.path, folder.read_config(), results, digest, rows, resampled)


def compare_runs(
    paths: Sequence[Path], *, baseline: Baseline = "first", max_rows: int, emit: Emit
) -> Comparison:
    """Compare the runs in folders, or in folders of folders, with the first or the best of them."""
    found = [folder for path in paths for folder in finished_runs(path, emit=emit)]
    folders = {folder.path.resolve(): folder for folder in found}
    if len(folders) < 2:
        raise UsageError(
            f"there is nothing to compare {' '.join(map(str, paths))} with",
            remedy="name two runs or more, or a folder that contains several",
        )
    names_differ = len({path.name for path in folders}) == len(folders)
    runs = [
        _FinishedRun.read(folder, path.name if names_differ else str(folder.path))
        for path, folder in folders.items()
    ]
    groups: dict[str, list[str]] = {}
    for run in runs:
        groups.setdefault(run.test_digest, []).append(run.name)
    if len(groups) > 1:
        raise DataDiffers(
            "the runs were tested on different rows: "
            + " | ".join(map(", ".join, groups.values())),
            remedy="compare runs of one of these groups, or make runs with the same data, test "
            "split, --task and --split-seed",
        )
    base: _FinishedRun | None = runs[0]
    if baseline == "best":
        metric = runs[0].config.training.metric_for_best_model
        base = best_of({run: run.results for run in runs}, metric)
    if base is None:
        raise UsageError(
            "which run is the best is not known: not all have a held-out validation split",
            remedy="compare with the first, --baseline first, or make the runs with"
            " --validation-fraction 0.1",
        )
    compared = [
        ComparedRun(
            run.name,
            str(run.path),
            run.results.test.metrics,
            None if run is base else _compare_with(base, run, max_rows=max_rows),
        )
        for run in runs
    ]
    options = {
        option.name: [option.value_in(run.config) for run in runs]
        for option in OPTIONS.values()
        if option.name not in _OPTIONS_LEFT_OUT
    }
    differing = {name: row for name, row in options.items() if any(one != row[0] for one in row)}
    return Comparison(base.results.task, len(base.predictions), base.name, compared, differing)


def finished_runs(path: Path, *, emit: Emit) -> list[RunFolder]:
    """Return a run, or the finished runs in a folder, by name."""
    # A link would name a run of this folder twice.
    paths = [path for path in path.glob("*/") if not path.is_symlink()]
    # With seed-9 before seed-10.
    paths.sort(key=lambda path: (path.name.rstrip("0123456789"), len(path.name), path.name))
    is_run = RunFolder(path).config_file.is_file()
    runs = [run for run in map(RunFolder, [path] if is_run else paths) if run.config_file.is_file()]
    finished = [run for run in runs if run.has_finished]
    if not finished:
        raise NotARun(
            f"{path} is neither a finished run nor a folder of finished runs"
            if is_there(path)
            else f"there is no folder {path}",
            remedy="name folders that finetune run has written, such as runs/trec-minilm-full, or "
            "finish the run with finetune run --resume-from-checkpoint",
        )
    for run in runs:
        if not run.has_finished:
            emit(WarningMessage(f"{run.path} is left out: the run has not finished"))
    return finished


def _compare_with(base: _FinishedRun, run: _FinishedRun, *, max_rows: int) -> Versus:
    task, metrics, before = base.results.task, run.results.test.metrics, base.results.test.metrics
    errors, base_errors = (task.row_errors(one.predictions) for one in (run, base))
    is_better, is_worse = errors < base_errors, errors > base_errors
    if task.class_names:
        is_better, is_worse = is_better & (errors == 0), is_worse & (base_errors == 0)

    def differing_rows(mask: NDArray[np.bool_]) -> list[DifferingRow]:
        """Return the rows that differ most, the first of equals first."""
        gaps = np.where(mask, np.abs(errors - base_errors), 0)
        order = np.argsort(-gaps, kind="stable")[:max_rows]
        return [
            DifferingRow(row, text_of(before), before["label"], before["predicted"],
                         run.predictions[row]["predicted"])
            for row in order[gaps[order] > 0].tolist()
            for before in [base.predictions[row]]
        ]  # fmt: skip

    better, worse = int(is_better.sum()), int(is_worse.sum())
    return Versus(
        differences={
            name: percentile_interval(metrics[name] - before[name], values - base.resampled[name])
            for name, values in run.resampled.items()
        },
        better=better,
        worse=worse,
        p_value=mcnemar_p_value(better, worse) if task.class_names else None,
        better_rows=differing_rows(is_better),
        worse_rows=differing_rows(is_worse),
    )
