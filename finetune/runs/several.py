"""Several runs of one call: seeds, folds of a cross-validation, or trials of a sweep."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.load import SECTIONS, check_name, check_type, check_value
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.config.yaml_files import read_yaml
from finetune.data import is_waiting
from finetune.errors import BatchDoesNotFitError, ConfigurationError, LossNotFiniteError
from finetune.evaluation.statistics import Interval, bootstrap, mean_interval, percentile_interval
from finetune.events import Info, emit, sent_to
from finetune.files import write_jsonl
from finetune.runs.folder import SEVERAL, FoldsFolder, SeveralFolder, SweepFolder
from finetune.runs.results import SCHEMA_VERSION, RunResults, best_of, read_results
from finetune.tasks.base import Labels, Outputs, Task
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import Scores
from finetune.tasks.shown import RunResultMixin

if TYPE_CHECKING:
    from finetune.runs.journal import Journal
    from finetune.runs.prepare import RunInputs
    from finetune.runs.run import WritePages

Rows = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]


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
        numbers: Sequence[int],
        *,
        metric: str | None = None,
        options: Mapping[int, Options] | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> "SeveralResults":
        """Read the results of finished runs; ``best`` has the best validation metric."""
        finished = [number for number in numbers if folder.run(number).has_finished]
        runs = {number: read_results(folder.run(number)) for number in finished}
        results = cls(
            folder.kind, numbers, runs, str(folder.path), metric,
            options=options or {}, failures=failures or {},
        )  # fmt: skip
        is_whole = len(runs) + len(results.failures) == len(numbers)
        if folder.kind == FoldsFolder.kind:
            return results._with_all_rows(read_rows(folder, numbers)) if is_whole else results
        # The best seed is known at any time, the best trial at the end.
        is_known = is_whole or folder.kind != SweepFolder.kind
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
        # Of a user's own metrics only the values of the folds are known.
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
        if self.kind == FoldsFolder.kind:
            return self.scores.records() if self.scores else []
        if self.kind != SweepFolder.kind:
            return [{"seed": seed, **run.test.metrics} for seed, run in self.runs.items()]
        return [
            {"trial": number, **self.options[number], str(self.metric): self.value(number)}
            for number in self.ranked
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``seeds.json``, ``folds.json`` or ``sweep.json``."""

        def name_of(number: int) -> str:
            return next(kind for kind in SEVERAL if kind.kind == self.kind).run_name(number)

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
        if self.kind == FoldsFolder.kind:
            intervals = {name: asdict(interval) for name, interval in self.intervals.items()}
            test = self.scores and self.scores.to_json()
            content |= {"test": test, "intervals": intervals, "spread": self.spread}
        elif self.kind == SweepFolder.kind:
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


def run_variants(
    folder: SeveralFolder,
    variants: Mapping[int, tuple[str, Options]],
    shared: "RunInputs",
    *,
    journal: "Journal",
    write_pages: "WritePages | None",
    write_table: Callable[[Mapping[int, str]], object],
    failures: Mapping[int, str],
) -> dict[int, str]:
    """Train the variants that are not finished; return why some trials of a sweep failed.

    Each variant has a title and the options that differ; in a cross-validation, it is a fold.
    """
    from finetune.runs.prepare import prepare_variant
    from finetune.runs.run import Run

    failed, is_sweep, measured = dict(failures), folder.kind == SweepFolder.kind, None
    expected = (LossNotFiniteError, BatchDoesNotFitError, ConfigurationError) if is_sweep else ()
    for place, (number, (title, options)) in enumerate(variants.items(), start=1):
        run_folder = folder.run(number)
        if run_folder.has_finished or number in failed:
            continue
        emit(Info(f"{title}, {place} of {len(variants)}"))
        run_journal, resumes = journal.copy(), run_folder.can_resume
        try:
            with sent_to(run_journal):
                config = change_options(shared.config, options)
                fold = number if folder.kind == FoldsFolder.kind else None
                inputs = prepare_variant(shared, config, fold=fold)
            with (
                run_folder.lock() if resumes else run_folder.create(overwrite=True),
                Run.begin(
                    inputs, run_folder, resumes=resumes, measured=measured, journal=run_journal
                ) as run,
            ):
                run.train()
                run.finish(write_pages=write_pages)
                measured = None if is_sweep else run.plan
        except expected as error:
            emit(Info(f"the trial failed: {error.message}"))
            failed[number] = error.message
        write_table(failed)
    return failed


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
    folder = FoldsFolder(path)
    task = folder.run(folder.numbers[0]).read_task()
    return folder.read(folder.predictions_file, lambda rows: OutOfFold.of_rows(task, rows))


def read_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Return the predictions of all folds, in the order of the table."""
    runs = map(folder.run, folds)
    rows = [row for run in runs for row in run.read(run.predictions_file, list)]
    return sorted(rows, key=lambda row: row["row"])


def write_rows(folder: SeveralFolder, folds: Sequence[int]) -> Rows:
    """Write the predictions of all folds into one file, and return them."""
    rows = read_rows(folder, folds)
    write_jsonl(folder.predictions_file, rows)
    return rows


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, integers if both are; ``log`` means uniform in the logarithm."""

    low: float
    high: float
    log: bool = False


Values = Sequence[Any] | Range
Space = Mapping[str, Values]


def read_space(path: Path) -> Space:
    """Return the values of each option in a YAML file, with or without sections."""
    space: dict[str, Values] = {}
    content = read_yaml(path)
    for name, value in content.items() if isinstance(content, dict) else ():
        options = value if name in SECTIONS and isinstance(value, dict) else {name: value}
        for option, values in options.items():
            check_name(option, name if name in SECTIONS else None, source=str(path))
            space[option] = _read_values(option, values, source=str(path))
    if not space:
        remedy = "write for example `learning_rate: [1e-4, 1e-3]` in a line"
        raise ConfigurationError(f"{path} names no options", remedy=remedy)
    return space


def _read_values(option: str, values: Any, *, source: str) -> Values:
    """Return the values of an option of the schema; ``ConfigurationError`` for others."""
    if OPTIONS[option].section not in ("model", "training") or option == "device":
        raise ConfigurationError(
            f"{source}: {option} is the same for all trials of a sweep",
            remedy="give it as a flag; options of model and training may differ",
        )
    if isinstance(values, list) and values:
        return [check_value(option, value, source) for value in values]
    if isinstance(values, dict) and {"low", "high"} <= {*values} <= {"low", "high", "log"}:
        low, high = (check_value(option, values[end], source) for end in ("low", "high"))
        is_log = check_type(bool, values.get("log", False), words=source, is_strict=False)
        if isinstance(low, int | float) and (0 if is_log else -math.inf) < low < high:
            return Range(low, high, is_log)
    raise ConfigurationError(
        f"{source}: {option} is {values!r}, which is neither a list nor low and high",
        remedy=f"write `{option}: [A, B]`, or `{option}: {{low: A, high: B, log: true}}`, where"
        " A is less than B and, with log, above 0",
    )


def choose_trials(space: Space, *, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the options of each trial, deterministically: a grid of lists, or random values."""
    generator = np.random.default_rng(seed)
    lists = [values for values in space.values() if not isinstance(values, Range)]
    if len(lists) == len(space):
        grid = [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
        if trials is None or trials >= len(grid):
            return grid
        return [grid[number] for number in generator.permutation(len(grid))[:trials]]
    if trials is None:
        ranges = ", ".join(name for name, values in space.items() if isinstance(values, Range))
        raise ConfigurationError(
            f"a range has no grid: {ranges}", remedy="say how many random trials: --trials 20"
        )
    return [
        {name: _draw(values, generator) for name, values in space.items()} for _ in range(trials)
    ]


def _draw(values: Values, generator: np.random.Generator) -> Any:
    """Return one of the values, or a number in the range with three digits."""
    if not isinstance(values, Range):
        return values[int(generator.integers(len(values)))]
    low, high = values.low, values.high
    if values.log:
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
    else:
        drawn = generator.uniform(low, high)
    return round(drawn) if isinstance(values.low, int) else float(f"{drawn:.3g}")


def describe_request(config: Config, chosen: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return everything that a second call must not change: all options, of each trial too."""
    shared = {
        name: Path(value).name if is_waiting(value) else value
        for name, option in OPTIONS.items()
        for value in [option.value_in(config)]
        if option.section in ("data", "model", "training") and not option.resumable
    }
    return [shared, *map(dict, chosen)]


def read_failures(folder: SweepFolder, request: list[dict[str, Any]]) -> dict[int, str]:
    """Return the failures of a started sweep by trial; raise if the trials differ."""

    def parse(content: dict[str, Any]) -> dict[int, str] | None:
        trials = enumerate(content["trials"].values(), start=1)
        failures = {number: trial["failure"] for number, trial in trials if trial["failure"]}
        return failures if content["request"] == request else None

    failures = folder.read(folder.table_file, parse)
    if failures is None:
        raise ConfigurationError(
            f"the sweep in {folder.path} started with another search space or other options",
            remedy="start over with --overwrite, or choose another folder with --output-dir",
        )
    return failures
