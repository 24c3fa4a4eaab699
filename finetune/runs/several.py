"""Several runs of one call: seeds, folds of a cross-validation, or trials of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import OPTIONS, change_options
from finetune.config.yaml_files import dump_config
from finetune.data import is_waiting
from finetune.devices.host import kept_awake
from finetune.errors import BatchDoesNotFitError, ConfigurationError, DataError, LossNotFiniteError
from finetune.evaluation.statistics import Interval, bootstrap, mean_interval, percentile_interval
from finetune.events import Info, emit, sent_to
from finetune.files import write_jsonl, write_text_atomically
from finetune.runs.folder import SeveralFolder
from finetune.runs.results import SCHEMA_VERSION, RunResults, best_of, read_results
from finetune.tasks.base import Labels, Outputs, Task
from finetune.tasks.metrics import METRICS, choose_metric
from finetune.tasks.scores import Scores
from finetune.tasks.tables import RunResultMixin, format_value

if TYPE_CHECKING:
    from finetune.runs.journal import Journal
    from finetune.runs.prepare import RunInputs
    from finetune.runs.request import RunRequest
    from finetune.runs.run import WritePages
    from finetune.training.plan import Plan

Rows = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]
WriteFoldsPage = Callable[[SeveralFolder, "SeveralResults", Rows], object]
# A sweep goes on after these.
FAILURES_OF_TRIALS = (LossNotFiniteError, BatchDoesNotFitError, ConfigurationError)


@dataclass(frozen=True, repr=False)
class SeveralResults(RunResultMixin):
    """Results of several finished runs by number, and the best one by validation, if known.

    In a cross-validation, ``scores`` cover all rows, each predicted by a model that did not see it,
    with 95% ``intervals``. They are known once all folds are finished. In a sweep, ``options`` has
    the options of each trial, and ``failures`` says why a trial could not be trained.
    """

    kind: str
    numbers: Sequence[int]
    runs: Mapping[int, RunResults]
    output_dir: str
    metric: str | None = None
    best: int | None = None
    scores: Scores | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    options: Mapping[int, Options] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        folder: SeveralFolder,
        variants: Mapping[int, Options],
        *,
        metric: str | None,
        failures: Mapping[int, str],
    ) -> "SeveralResults":
        """Read the results of finished runs; ``best`` has the best validation metric."""
        finished = [number for number in variants if folder.run(number).has_finished]
        runs = {number: read_results(folder.run(number)) for number in finished}
        if runs:
            metric = choose_metric(metric, runs[finished[0]].task.problem_type).name
        results = cls(
            folder.kind, [*variants], runs, str(folder.path), metric,
            options=variants if folder.kind == "sweep" else {}, failures=failures,
        )  # fmt: skip
        is_whole = len(runs) + len(failures) == len(variants)
        if folder.kind == "folds":
            return results._with_all_rows(read_rows(folder, [*variants])) if is_whole else results
        # The best seed is known at any time, the best trial at the end.
        is_known = is_whole or folder.kind == "seeds"
        return replace(results, best=best_of(runs, metric) if is_known else None)

    def _with_all_rows(self, rows: Rows) -> "SeveralResults":
        """Return the results with scores of the predictions of all folds."""
        task = next(iter(self.runs.values())).task
        predictions = OutOfFold.of_rows(task, rows)
        scores = task.score_outputs(predictions.outputs, predictions.losses, predictions.labels)
        drawn = bootstrap(task.weighted_metrics(rows), rows=len(rows))
        intervals = {
            name: percentile_interval(scores.metrics[name], values)
            for name, values in drawn.items()
        }
        # For metrics of the user, only the values of the folds are known.
        means = {name: mean for name, mean in self.test.items() if name not in scores.metrics}
        metrics = scores.metrics | {name: mean.value for name, mean in means.items()}
        return replace(self, scores=replace(scores, metrics=metrics), intervals=intervals | means)

    @property
    def test(self) -> dict[str, Interval]:
        """Mean of each test metric, with its 95% interval; empty for fewer than two runs."""
        metrics = [run.test.metrics for run in self.runs.values()]
        if len(metrics) < 2:
            return {}
        return {name: mean_interval([of_run[name] for of_run in metrics]) for name in metrics[0]}

    @property
    def spread(self) -> dict[str, float]:
        """The standard deviation of each test metric over the runs; empty for fewer than two."""
        metrics = [run.test.metrics for run in self.runs.values()]
        names = metrics[0] if len(metrics) > 1 else ()
        return {name: float(np.std([of_run[name] for of_run in metrics], ddof=1)) for name in names}

    def value(self, number: int) -> float | None:
        """Return a run's validation metric, by which the best is chosen; None if not known."""
        run = self.runs.get(number)
        return (
            run.validation.metrics[self.metric] if run and run.validation and self.metric else None
        )

    @property
    def ranked(self) -> list[int]:
        """The numbers of the trials of a sweep, the best first, then those that failed."""

        def rank(number: int) -> tuple[bool, float]:
            value = self.value(number)
            sign = METRICS[self.metric].sign if self.metric else 1
            return number != self.best, float("inf") if value is None else -sign * value

        return sorted(self.numbers, key=rank)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each seed, of all rows of the folds, or of each trial."""
        if self.kind == "folds":
            return self.scores.records() if self.scores else []
        if self.kind != "sweep":
            return [{"seed": seed, **run.test.metrics} for seed, run in self.runs.items()]
        return [
            {"trial": number, **self.options[number], str(self.metric): self.value(number)}
            for number in self.ranked
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``seeds.json``, ``folds.json`` or ``sweep.json``."""

        def name_of(number: int) -> str:
            return SeveralFolder(Path(self.output_dir), self.kind).run_name(number)

        content = {
            "schema_version": SCHEMA_VERSION,
            self.kind: list(self.numbers),
            "best": None if self.best is None else name_of(self.best),
        }
        runs = {
            name_of(number): {
                "eval": run.validation and run.validation.metrics,
                "test": run.test.metrics,
            }
            for number, run in self.runs.items()
        }
        if self.kind == "folds":
            intervals = {name: asdict(interval) for name, interval in self.intervals.items()}
            test = self.scores and self.scores.to_json()
            content |= {"test": test, "intervals": intervals, "spread": self.spread}
        elif self.kind == "sweep":
            trials = {
                name_of(number): {
                    "options": dict(self.options[number]),
                    "value": self.value(number),
                    "failure": self.failures.get(number),
                }
                for number in self.numbers
            }
            return {**content, "metric": self.metric, "trials": trials}
        else:
            content["test"] = {name: asdict(interval) for name, interval in self.test.items()}
        return {**content, "runs": runs}


def train_several(
    request: "RunRequest", *, write_pages: "WritePages", write_folds_page: WriteFoldsPage
) -> SeveralResults:
    """Train several seeds, the folds of a cross-validation, or the trials of a sweep.

    Runs that have finished stay as they are. A trial that can't be trained stops no other trial.
    """
    from finetune.runs.failures import interruption_explained
    from finetune.runs.journal import Journal
    from finetune.runs.prepare import keep_tables, prepare

    journal, variants, measured = Journal(), request.variants, None
    with kept_awake(), request.lock() as locked:
        folder = request.folder(locked.path)
        assert isinstance(folder, SeveralFolder)
        failures: dict[int, str] = {}
        if request.trials and request.resumed:
            failures = _read_failures(folder, request)

        def write_table() -> SeveralResults:
            metric = request.config.training.metric_for_best_model
            results = SeveralResults.read(folder, variants, metric=metric, failures=failures)
            content = results.to_json()
            if request.trials:
                content["request"] = _describe_request(request)
            folder.write_table(content)
            return results

        waiting = [
            number
            for number in variants
            if number not in failures and not (request.resumed and folder.run(number).has_finished)
        ]
        if request.resumed and not waiting:
            emit(Info(f"the runs in {folder.path} have finished: nothing is left to do"))
            return _complete(folder, write_table(), write_folds_page)
        with interruption_explained(folder), sent_to(journal):
            shared = prepare(request.config, sources=request.sources, folds=request.folds)
            shared = keep_tables(shared, folder)
            _start(folder, request, shared)
            write_table()
            for number in waiting:
                try:
                    measured = _train_variant(
                        folder, request, number, shared, measured, journal, write_pages,
                        is_first=number == waiting[0],
                    )  # fmt: skip
                except FAILURES_OF_TRIALS as error:
                    if not request.trials:
                        raise
                    emit(Info(f"the trial failed: {error.message}"))
                    failures[number] = error.message
                write_table()
        if request.config.data.private_data:
            folder.delete_tables()
        return _complete(folder, write_table(), write_folds_page)


def _start(folder: SeveralFolder, request: "RunRequest", shared: "RunInputs") -> None:
    """Start the folder of several runs, or check that data and model are still the same."""
    from finetune.runs.manifest import Manifest

    if request.trials and "validation" not in shared.examples:
        raise DataError(
            "a sweep compares trials on validation rows, but there are none",
            remedy="add rows, or add --validation-file",
        )
    manifest = Manifest.of(shared)
    if request.resumed:
        remedy = "restore it, or choose another folder with --output-dir"
        Manifest.read(folder).check(manifest, remedy=remedy)
    else:
        folder.start()
        manifest.write(folder)


def _train_variant(
    folder: SeveralFolder,
    request: "RunRequest",
    number: int,
    shared: "RunInputs",
    measured: "Plan | None",
    journal: "Journal",
    write_pages: "WritePages",
    *,
    is_first: bool,
) -> "Plan | None":
    """Train one of the runs; return its plan, whose measurements later runs reuse.

    In a sweep they are not reused, because trials may differ in what they depend on.
    """
    from finetune.runs.prepare import prepare_variant
    from finetune.runs.run import Run

    variants, run_folder = request.variants, folder.run(number)
    title = f"{folder.run_kind} {number}"
    if request.trials:
        title += f" ({format_value(variants[number])})"
    emit(Info(f"{title}, {[*variants].index(number) + 1} of {len(variants)}"))
    journal, resumes = journal.copy(), run_folder.can_resume
    with sent_to(journal):
        config = change_options(shared.config, variants[number])
        fold = number if request.folds else None
        inputs = prepare_variant(shared, config, fold=fold, is_first=is_first)
    with (
        run_folder.lock() if resumes else run_folder.create(overwrite=True),
        Run.begin(inputs, run_folder, resumes=resumes, measured=measured, journal=journal) as run,
    ):
        run.train()
        run.finish(write_pages=write_pages if request.keeps_models else None)
        return None if request.trials else run.plan


def _complete(
    folder: SeveralFolder, results: SeveralResults, write_folds_page: WriteFoldsPage
) -> SeveralResults:
    """Write the page of all folds or the best configuration of a sweep, which has finished."""
    if results.scores and not folder.report_file.exists():
        rows = read_rows(folder, results.numbers)
        write_jsonl(folder.predictions_file, rows)
        write_folds_page(folder, results, rows)
    if results.kind == "sweep":
        if results.best is None:
            failures = "; ".join({*results.failures.values()})
            remedy = "choose other values, and start over with --overwrite"
            raise ConfigurationError(f"no trial could be trained: {failures}", remedy=remedy)
        best = folder.run(results.best).read_config()
        write_text_atomically(folder.best_file, dump_config(best))
    return results


def _describe_request(request: "RunRequest") -> list[dict[str, Any]]:
    """Return all options of all trials, which must be the same when a sweep continues."""
    shared = {
        name: Path(value).name if is_waiting(value) else value
        for name, option in OPTIONS.items()
        for value in [option.value_in(request.config)]
        if option.section in ("data", "model", "training") and not option.resumable
    }
    return [shared, *map(dict, request.trials)]


def _read_failures(folder: SeveralFolder, request: "RunRequest") -> dict[int, str]:
    """Return the failures of a started sweep by trial; raise if the trials differ."""
    content = folder.read(folder.table_file, dict)
    if content["request"] != _describe_request(request):
        raise ConfigurationError(
            f"the sweep in {folder.path} started with another search space or other options",
            remedy="start over with --overwrite, or choose another folder with --output-dir",
        )
    failures = (trial["failure"] for trial in content["trials"].values())
    return {number: failure for number, failure in enumerate(failures, start=1) if failure}


@dataclass(frozen=True)
class OutOfFold:
    """Predictions of all rows, each by a model that did not see it, in the order of the table.

    ``rows`` numbers the rows from 0: the rows of the table, then the rows of a validation file.
    ``losses`` is float64 [rows]. The task determines the types of labels and outputs.
    """

    task: Task
    rows: NDArray[np.int64]
    labels: Labels
    outputs: Outputs
    losses: NDArray[np.float64]

    @classmethod
    def of_rows(cls, task: Task, rows: Rows) -> "OutOfFold":
        """Return the contents of rows of ``predictions.jsonl``."""
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
    """Return the predictions of a finished cross-validation, or raise ``NotARunError``."""
    folder = SeveralFolder(path, "folds")
    task = folder.run(folder.numbers[0]).read_task()
    return folder.read(folder.predictions_file, lambda rows: OutOfFold.of_rows(task, rows))


def read_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Return the predictions of all folds, in the order of the table."""
    runs = map(folder.run, folds)
    rows = [row for run in runs for row in run.read(run.predictions_file, list)]
    return sorted(rows, key=lambda row: row["row"])
