"""The results of a cross-validation: what its models predict of rows that they have not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.evaluation.statistics import Interval, bootstrap, percentile_interval
from finetune.files import write_jsonl
from finetune.runs.folder import FoldsFolder, SeveralFolder
from finetune.runs.results import SCHEMA_VERSION, RunResults, read_finished, tabulate_runs
from finetune.tasks.base import Labels, Outputs, Task
from finetune.tasks.scores import Scores
from finetune.tasks.shown import Shown

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OutOfFold:
    """Predictions of all rows, each by a model that has not seen it, in the order of the table.

    ``rows`` are numbers of rows, from 0: those of the table, then those of a validation file;
    ``losses`` float64 [rows]. Labels and outputs are as the task has them.
    """

    task: Task
    rows: NDArray[np.int64]
    labels: Labels
    outputs: Outputs
    losses: NDArray[np.float64]

    @classmethod
    def of_rows(cls, task: Task, rows: Rows) -> "OutOfFold":
        """Return what rows of ``predictions.jsonl`` say."""
        probabilities: NDArray[np.float32] | None = None
        if task.class_names:
            probabilities = np.zeros((len(rows), len(task.class_names)), np.float32)
            for number, row in enumerate(rows):
                columns = [task.class_numbers[name] for name in row["probabilities"]]
                probabilities[number, columns] = [*row["probabilities"].values()]
        names = ("label", "predicted")
        labels, predicted = (task.from_json([row[name] for row in rows]) for name in names)
        return cls(
            task,
            np.array([row["row"] for row in rows]),
            labels,
            Outputs(predicted, probabilities),
            np.array([row["loss"] for row in rows]),
        )


def read_out_of_fold(path: Path) -> OutOfFold:
    """Return what a finished cross-validation predicts; raise ``NotARun`` if it can't be read."""
    folder = FoldsFolder(path)
    task = folder.run(folder.numbers[0]).read_task()
    return folder.read(folder.predictions_file, lambda rows: OutOfFold.of_rows(task, rows))


@dataclass(frozen=True, repr=False)
class FoldResults(Shown):
    """What the finished folds of a cross-validation have found.

    ``scores`` are those of all rows, each predicted by the model that has not seen it, with 95%
    ``intervals`` over these rows; None and empty until all folds have finished.
    """

    runs: Mapping[int, RunResults]
    folds: Sequence[int]
    output_dir: str
    scores: Scores | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def spread(self) -> dict[str, float]:
        """The standard deviation of each metric over the folds; empty for fewer than two."""
        metrics = [run.test.metrics for run in self.runs.values()]
        names = metrics[0] if len(metrics) > 1 else ()
        return {name: float(np.std([one[name] for one in metrics], ddof=1)) for name in names}

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each metric of all rows, once all folds have finished."""
        return self.scores.records() if self.scores else []

    @classmethod
    def read(cls, folder: SeveralFolder, folds: Sequence[int]) -> "FoldResults":
        """Read what the finished folds have found."""
        runs = read_finished(folder, folds)
        results = cls(runs, folds, str(folder.path))
        if len(runs) < len(folds):
            return results
        task, rows = runs[folds[0]].task, read_rows(folder, folds)
        found = OutOfFold.of_rows(task, rows)
        scores = task.score_outputs(found.outputs, found.losses, found.labels)
        drawn = bootstrap(task.weighted_metrics(rows), rows=len(rows))
        intervals = {
            name: percentile_interval(scores.metrics[name], values)
            for name, values in drawn.items()
        }
        return replace(results, scores=scores, intervals=intervals)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``folds.json``; ``test`` is of the rows of all folds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "folds": list(self.folds),
            "best": None,
            "test": self.scores and self.scores.to_json(),
            "intervals": {name: asdict(interval) for name, interval in self.intervals.items()},
            "spread": self.spread,
            "runs": tabulate_runs(FoldsFolder, self.runs),
        }


def read_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Return the predictions of all folds, in the order of the table."""
    runs = map(folder.run, folds)
    found = [row for run in runs for row in run.read(run.predictions_file, list)]
    return sorted(found, key=lambda row: row["row"])


def write_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Write the predictions of all folds into one file, and return them."""
    rows = read_rows(folder, folds)
    write_jsonl(folder.predictions_file, rows)
    return rows
