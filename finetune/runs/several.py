"""Runs several trainings: seeds, cross-validation folds, or sweep trials."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.load import dump_config
from finetune.config.schema import OPTIONS, change_options
from finetune.devices.host import kept_awake
from finetune.errors import BatchDoesNotFitError, ConfigurationError, DataError, LossNotFiniteError
from finetune.evaluation.statistics import Interval, bootstrap, mean_interval, metric_interval
from finetune.events import Info, emit, sent_to
from finetune.files import SCHEMA_VERSION, write_json, write_jsonl, write_text_atomically
from finetune.runs.folder import RUN_KINDS, RunFolder, SeveralFolder
from finetune.runs.journal import Journal
from finetune.runs.manifest import Manifest
from finetune.runs.request import RunRequest, find_changes
from finetune.runs.results import RunResults, best_of, describe_weakest, read_results, with_distinct
from finetune.tasks.base import Outputs, Task
from finetune.tasks.metrics import METRICS, choose_metric
from finetune.tasks.scores import Scores
from finetune.tasks.tables import RunResultMixin, format_value

if TYPE_CHECKING:
    from finetune.runs.prepare import RunInputs
    from finetune.runs.run import WritePages
    from finetune.training.plan import Plan

Rows = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]
WriteFoldsPage = Callable[[SeveralFolder, "SeveralResults", Rows], object]
# A sweep continues after these errors.
FAILURES_OF_TRIALS = (LossNotFiniteError, BatchDoesNotFitError, ConfigurationError)


@dataclass(frozen=True, repr=False)
class SeveralResults(RunResultMixin):
    """Results of several finished runs by number, and the best run on validation rows, if known.

    In a cross-validation, ``scores`` cover all rows, each predicted by a model that did not see it,
    with 95% ``intervals``. They are known once all folds are finished. In a sweep, ``options``
    contains the options of each trial, and ``failures`` the reason why a trial could not be
    trained.
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
        """Read the results of finished runs. ``best`` has the best validation metric."""
        finished = [number for number in variants if folder.run(number).has_finished]
        runs = {number: read_results(folder.run(number)) for number in finished}
        if runs:
            metric = choose_metric(metric, runs[finished[0]].task.problem_type).name
        is_whole = len(runs) + len(failures) == len(variants)
        # The best seed is known at any time, the best trial only at the end.
        is_known = folder.kind == "seeds" or (folder.kind == "sweep" and is_whole)
        results = cls(
            folder.kind,
            [*variants],
            runs,
            str(folder.path),
            metric,
            best_of({number: [run] for number, run in runs.items()}, metric) if is_known else None,
            options=variants if folder.kind == "sweep" else {},
            failures=failures,
        )
        if folder.kind == "folds" and is_whole:
            return results._with_all_rows(read_rows(folder, [*variants]))
        return results

    def _with_all_rows(self, rows: Rows) -> "SeveralResults":
        """Add scores over the predictions of all folds."""
        task = next(iter(self.runs.values())).task
        labels = task.from_json([row["label"] for row in rows])
        losses = np.array([row["loss"] for row in rows])
        scores = task.score_outputs(_outputs_of(task, rows), losses, labels)
        scores = with_distinct(scores, task, rows)
        drawn = bootstrap(task.weighted_metrics(rows), rows=len(rows))
        intervals = {
            name: metric_interval(METRICS[name], scores.metrics[name], len(rows), values)
            for name, values in drawn.items()
        }
        # User metrics are known only per fold.
        means = {name: mean for name, mean in self.test.items() if name not in scores.metrics}
        metrics = scores.metrics | {name: mean.value for name, mean in means.items()}
        return replace(self, scores=replace(scores, metrics=metrics), intervals=intervals | means)

    @property
    def test(self) -> dict[str, Interval]:
        """Mean of each test metric, with its 95% interval. Empty for fewer than two runs."""
        return {name: mean_interval(values) for name, values in self._test_values.items()}

    @property
    def spread(self) -> dict[str, float]:
        """Standard deviation of each test metric over runs. Empty for fewer than two runs."""
        return {name: float(np.std(values, ddof=1)) for name, values in self._test_values.items()}

    @property
    def _test_values(self) -> dict[str, list[float]]:
        metrics = [run.test.metrics for run in self.runs.values()]
        names = metrics[0] if len(metrics) > 1 else ()
        return {name: [of_run[name] for of_run in metrics] for name in names}

    @property
    def summary(self) -> str:
        """A summary over all rows of a finished cross-validation."""
        assert self.scores
        about_all = self.scores.describe("rows, each by a model that did not see it")
        return f"{about_all} {describe_weakest(self.scores)}".rstrip()

    def value(self, number: int) -> float | None:
        """Return the validation metric that selects the best run, or None if unknown."""
        run = self.runs.get(number)
        return run.validation.metrics[str(self.metric)] if run and run.validation else None

    @property
    def ranked(self) -> list[int]:
        """The trial numbers of a sweep: best first, failed trials last."""

        def rank(number: int) -> tuple[bool, float]:
            value = self.value(number)
            sign = METRICS[self.metric].sign if self.metric else 1
            return number != self.best, float("inf") if value is None else -sign * value

        return sorted(self.numbers, key=rank)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each seed, of all rows of all folds, or of each trial."""
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
            return f"{RUN_KINDS[self.kind]}-{number}"

        def metrics_of(run: RunResults) -> dict[str, Any]:
            return {"eval": run.validation and run.validation.metrics, "test": run.test.metrics}

        content = {
            "schema_version": SCHEMA_VERSION,
            self.kind: list(self.numbers),
            "best": None if self.best is None else name_of(self.best),
        }
        if self.kind == "sweep":
            trials = {
                name_of(number): {
                    "options": dict(self.options[number]),
                    "value": self.value(number),
                    "failure": self.failures.get(number),
                }
                for number in self.numbers
            }
            return {**content, "metric": self.metric, "trials": trials}
        if self.kind == "folds":
            content["test"] = self.scores and self.scores.to_json()
            content["intervals"] = _as_json(self.intervals)
            content["spread"] = self.spread
        else:
            content["test"] = _as_json(self.test)
        content["runs"] = {name_of(number): metrics_of(run) for number, run in self.runs.items()}
        return content


def _as_json(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: asdict(interval) for name, interval in intervals.items()}


def train_several(
    request: RunRequest, *, write_pages: "WritePages", write_folds_page: WriteFoldsPage
) -> SeveralResults:
    """Train several seeds, cross-validation folds, or sweep trials.

    Finished runs are not repeated. If a trial can't be trained, the other trials continue.
    """
    from finetune.runs.prepare import keep_tables, prepare, prepare_variant
    from finetune.runs.run import interruption_explained

    journal, variants = Journal(), request.variants
    plan: Plan | None = None
    with kept_awake(), request.lock() as locked:
        folder = request.folder(locked.path)
        assert isinstance(folder, SeveralFolder)
        failures: dict[int, str] = {}
        if request.trials and request.resumed:
            failures = _read_failures(folder, request)

        def write_table() -> SeveralResults:
            metric = request.config.training.metric_for_best_model
            results = SeveralResults.read(folder, variants, metric=metric, failures=failures)
            folder.digests_file.unlink(missing_ok=True)
            write_json(folder.table_file, results.to_json())
            return results

        waiting = [
            number
            for number in variants
            if number not in failures and not (request.resumed and folder.run(number).has_finished)
        ]
        for run in folder.runs:
            if request.resumed and run.has_finished and run.checkpoints_folder.exists():
                run.delete_checkpoints()  # a disk failed at the very end
        if request.resumed and not waiting:
            emit(Info(f"the runs in {folder.path} have finished: nothing is left to do"))
            return _complete(folder, write_table(), write_folds_page)
        with interruption_explained(folder), sent_to(journal):
            shared = prepare(
                request.config,
                sources=request.sources,
                folds=request.folds,
                trials=request.trials,
                read=request.read,
            )
            shared = keep_tables(shared, folder)
            if request.seeds and _ignores_seed(shared):
                reason = "a linear head is fitted on the pretrained encoder"
                emit(Info(f"training only one seed, because the seed changes nothing: {reason}"))
                variants = dict([*variants.items()][:1])
                waiting = [number for number in waiting if number in variants]
            _start(folder, request, shared)
            write_table()
            for number in waiting:
                options = f" ({format_value(variants[number])})" if request.trials else ""
                position = f"{[*variants].index(number) + 1} of {len(variants)}"
                emit(Info(f"{folder.run_kind} {number}{options}, {position}"))
                run_journal = journal.copy()
                try:
                    with sent_to(run_journal):
                        set_here = dict.fromkeys(variants[number], folder.kind)
                        inputs = prepare_variant(
                            replace(shared, sources={**shared.sources, **set_here}),
                            change_options(shared.config, variants[number]),
                            fold=number if request.folds else None,
                            is_first=number == waiting[0],
                        )
                    pages = write_pages if request.keeps_models else None
                    plan = _train(inputs, folder.run(number), run_journal, plan, pages)
                except FAILURES_OF_TRIALS as error:
                    if not request.trials:
                        raise
                    emit(Info(f"the trial failed: {error.message}"))
                    failures[number] = error.message
                if request.trials:
                    plan = None  # measurements may not apply to other trials
                write_table()
        if request.config.data.private_data:
            folder.delete_tables()
        return _complete(folder, write_table(), write_folds_page)


def _ignores_seed(inputs: "RunInputs") -> bool:
    is_pretrained = inputs.text_model.pooling == "mean" and not inputs.config.model.from_scratch
    return is_pretrained and inputs.method.fits_head and not inputs.method.is_contrastive


def _start(folder: SeveralFolder, request: RunRequest, shared: "RunInputs") -> None:
    """Start the folder of several runs, or check that data and model haven't changed."""
    if request.trials and "validation" not in shared.examples:
        raise DataError(
            "a sweep needs validation rows to compare trials",
            remedy="add rows, or add --validation-file",
        )
    manifest = Manifest.of(shared)
    if request.resumed:
        remedy = "restore it, or choose another folder with --output-dir"
        Manifest.read(folder).check(manifest, remedy=remedy)
    else:
        folder.start()
        replace(manifest, options=request.config).write(folder)


def _train(
    inputs: "RunInputs",
    folder: RunFolder,
    journal: Journal,
    measured: "Plan | None",
    write_pages: "WritePages | None",
) -> "Plan":
    """Train one of the runs. Return its plan, whose measurements later runs reuse."""
    from finetune.runs.run import Run

    resumes = folder.can_resume
    with (
        folder.lock() if resumes else folder.make(),
        Run.begin(inputs, folder, resumes=resumes, measured=measured, journal=journal) as run,
    ):
        run.train()
        run.finish(write_pages=write_pages)
        return run.plan


def _complete(
    folder: SeveralFolder, results: SeveralResults, write_folds_page: WriteFoldsPage
) -> SeveralResults:
    """Write the page of a finished cross-validation, or the best configuration of a sweep."""
    if results.scores and not folder.report_file.exists():
        rows = read_rows(folder, results.numbers)
        write_jsonl(folder.predictions_file, rows)
        write_folds_page(folder, results, rows)
    if results.kind == "sweep":
        if results.best is None:
            failures = "; ".join({*results.failures.values()})
            remedy = "choose other values, and start over with --overwrite"
            raise ConfigurationError(f"all trials failed: {failures}", remedy=remedy)
        best = folder.run(results.best).read_config()
        write_text_atomically(folder.best_file, dump_config(best))
    folder.write_digests()
    return results


def _read_failures(folder: SeveralFolder, request: RunRequest) -> dict[int, str]:
    """Return the failures of a started sweep by trial. Raise if trials or options differ."""
    trials = folder.read(folder.table_file, lambda content: [*content["trials"].values()])
    sections = ("data", "model", "training")
    names = [name for name, option in OPTIONS.items() if option.section in sections]
    saved = Manifest.read(folder).options or request.config
    is_same = [trial["options"] for trial in trials] == [*map(dict, request.trials)]
    if not is_same or find_changes(saved, request.config, names):
        raise ConfigurationError(
            f"the sweep in {folder.path} started with a different search space or other options",
            remedy="start over with --overwrite, or choose another folder with --output-dir",
        )
    failures = {number: trial["failure"] for number, trial in enumerate(trials, start=1)}
    return {number: failure for number, failure in failures.items() if failure}


def _outputs_of(task: Task, rows: Rows) -> Outputs:
    """Return the predictions in rows of ``predictions.jsonl``."""
    probabilities: NDArray[np.float32] | None = None
    if task.class_names:
        by_class = [row["probabilities"] for row in rows]
        values = [[row.get(name, 0.0) for name in task.class_names] for row in by_class]
        probabilities = np.array(values, np.float32)
    return Outputs(task.from_json([row["predicted"] for row in rows]), probabilities)


def read_out_of_fold(path: Path) -> tuple[Task, Rows, Outputs]:
    """Return the task of a finished cross-validation, its rows, and their predictions."""
    folder = SeveralFolder(path, "folds")
    task = folder.run(folder.numbers[0]).read_task()

    def parse(rows: Rows) -> tuple[Task, Rows, Outputs]:
        return task, rows, _outputs_of(task, rows)

    return folder.read(folder.predictions_file, parse)


def read_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Return the predictions of all folds, in the order of the table."""
    runs = map(folder.run, folds)
    rows = [row for run in runs for row in run.read(run.predictions_file, list)]
    return sorted(rows, key=lambda row: (row.get("split", "train"), row["row"]))
