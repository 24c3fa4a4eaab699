"""Compares finished runs: metrics, options, and rows that only some runs predict correctly."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import OPTIONS, Config
from finetune.errors import NotARunError, UsageError
from finetune.evaluation.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Interval,
    bootstrap,
    mcnemar_p_value,
    metric_interval,
    percentile_interval,
)
from finetune.events import WarningMessage, emit
from finetune.files import SCHEMA_VERSION, is_there
from finetune.runs.folder import RunFolder, SeveralFolder, find_several
from finetune.runs.results import RunResults, best_of, read_results
from finetune.tasks.base import Task
from finetune.tasks.metrics import METRICS, SINGLE
from finetune.tasks.scores import MetricValue, Scores
from finetune.tasks.tables import (
    DisplayMixin,
    Table,
    capitalize,
    duration,
    format_number,
    format_value,
    full_text,
    text_of,
)

Reference = Literal["first", "best"]
# Runs are compared if they share more than this fraction of their test rows.
SHARED = 0.5


@dataclass(frozen=True)
class PairedComparison:
    """A run compared with the reference: metric differences, with paired intervals.

    ``better`` counts rows that only the run predicts correctly or, in regression, more accurately.
    The rows that differ most are listed with ``row`` (its line, or its row in a sheet), ``text``,
    ``label``, ``reference`` and ``run``. The p-value is from McNemar's exact test, None in
    regression and with several seeds.
    """

    differences: Mapping[str, Interval]
    better: int
    worse: int
    p_value: float | None
    better_rows: Sequence[Mapping[str, Any]]
    worse_rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ComparedRun:
    """A run, or the means over ``seeds`` runs that differ only in their seed.

    The interval of the first metric is over rows. Its ``spread`` is the standard deviation over
    seeds.
    """

    name: str
    path: str
    seeds: int
    metrics: Mapping[str, float]
    interval: Interval
    spread: float | None
    train_seconds: float
    parameters: int
    ms_per_text: float | None
    versus_reference: PairedComparison | None = None


@dataclass(frozen=True)
class ComparedGroup:
    """Runs on the same test rows. ``options`` lists differing options, with one value per run.

    The notes list rows and labels that differ between runs. The verdict recommends a run.
    """

    task: Task
    data: str
    samples: int
    reference: str
    runs: Sequence[ComparedRun]
    options: Mapping[str, Sequence[Any]]
    notes: Sequence[str]
    verdict: str


@dataclass(frozen=True, repr=False)
class Comparison(DisplayMixin):
    """Finished runs, grouped by task and test rows."""

    groups: Sequence[ComparedGroup]

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each run."""
        return [
            {"run": run.name, "data": group.data, **run.metrics, "ms_per_text": run.ms_per_text}
            for group in self.groups
            for run in group.runs
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``finetune compare``."""
        groups = [
            {**vars(group), "task": group.task.name, "runs": [*map(asdict, group.runs)]}
            for group in self.groups
        ]
        return {"schema_version": SCHEMA_VERSION, "groups": groups}


Row = Mapping[str, Any]
Key = tuple[str, int]
"""A text, and the number of the row among rows with this text, ordered by label."""


@dataclass(frozen=True, eq=False)
class _Setting:
    """A finished run, the folds of a cross-validation, or runs that differ only in their seed.

    ``results`` belong to the run, to each fold or to each seed. For seeds, ``rows`` are the rows
    of the first. ``resampled`` contains the metrics on resampled rows.
    """

    path: Path
    config: Config
    results: Sequence[RunResults]
    task: Task
    metrics: Mapping[str, float]
    rows: Mapping[Key, Row]
    resampled: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    seeds: "Sequence[_Setting]" = ()
    name: str = ""

    @classmethod
    def read(cls, folder: RunFolder) -> "_Setting":
        runs = folder.runs if isinstance(folder, SeveralFolder) else [folder]
        for run in runs:
            run.report_edits()
        results = [*map(read_results, runs)]
        task, scores = results[0].task, results[0].test
        if isinstance(folder, SeveralFolder):
            scores = folder.read(folder.table_file, lambda table: Scores.from_json(table["test"]))

        def parse(rows: list[Row]) -> dict[Key, Row]:
            if len(rows) != scores.samples:
                raise ValueError(f"{len(rows)} rows, but {scores.samples} rows were tested")
            task.weighted_metrics(rows)  # fails for an unknown class
            return _number_texts(rows)

        rows = folder.read(folder.predictions_file, parse)
        return cls(folder.path, folder.read_config(), results, task, scores.metrics, rows)

    @classmethod
    def merge(cls, runs: "Sequence[_Setting]") -> "_Setting":
        """Merge runs that differ only in their seed. Resample both runs and rows."""
        first, number = runs[0], len(runs)
        drawn = np.random.default_rng(0).integers(number, size=(number, RESAMPLES))
        resampled = {}
        for name in first.resampled:
            values = np.stack([run.resampled[name] for run in runs])
            resampled[name] = np.take_along_axis(values, drawn, axis=0).mean(axis=0)
        return replace(
            first,
            path=first.path.parent if find_several(first.path.parent) else first.path,
            results=[results for run in runs for results in run.results],
            metrics={name: mean([run.metrics[name] for run in runs]) for name in first.metrics},
            resampled=resampled,
            seeds=runs,
        )

    def options(self, *, with_seed: bool) -> dict[str, Any]:
        """Return the options by name, without folder options."""
        hidden = {"output_dir", "overwrite", *(() if with_seed else ["seed"])}
        return {name: OPTIONS[name].value_in(self.config) for name in OPTIONS if name not in hidden}

    def describe(self, versus: PairedComparison | None) -> ComparedRun:
        """Return the run for display."""
        first, metric = self.results[0], METRICS[next(iter(self.metrics))]
        value, seeds = self.metrics[metric.name], self.seeds or [self]
        values = [run.metrics[metric.name] for run in seeds]
        tested = sum(results.test.samples for results in self.results)
        test_seconds = sum(results.stage_seconds["test"] for results in self.results)
        return ComparedRun(
            self.name,
            str(self.path),
            len(values),
            self.metrics,
            metric_interval(metric, value, len(self.rows), self.resampled[metric.name]),
            float(np.std(values, ddof=1)) if len(values) > 1 else None,
            sum(results.training.train_runtime for results in self.results) / len(seeds),
            first.facts.total_parameters,
            # In other modes, features were computed or read before the test.
            1e3 * test_seconds / tested if first.facts.mode == "full" else None,
            versus,
        )


def compare_runs(
    paths: Sequence[Path], *, reference: Reference = "first", max_rows: int
) -> Comparison:
    """Compare runs with the first or the best run, in one group per set of test rows."""
    folders = {folder.path.resolve(): folder for path in paths for folder in finished_runs(path)}
    if len(folders) < 2:
        raise UsageError(
            f"only one run in {' '.join(map(str, paths))}: nothing to compare it with",
            remedy="pass two or more runs, or a folder with several runs",
        )
    runs = [*map(_Setting.read, folders.values())]
    groups = _group(runs, least=SHARED)
    if len(groups) == len(runs):  # then any shared rows are better than no comparison
        groups = _group(runs, least=0)
    if len(groups) > 1:
        message = f"the runs were tested on {len(groups)} different sets of rows"
        remedy = "use --folds 5, which tests all rows of a table, or the same --test-file"
        emit(WarningMessage(f"{message}, so there is one table per set", remedy=remedy))
    return Comparison(
        [_compare_group(runs, reference=reference, max_rows=max_rows) for runs in groups]
    )


def _number_texts(rows: Sequence[Row]) -> dict[Key, Row]:
    above, keys = Counter[str](), dict[int, Key]()
    for place in sorted(range(len(rows)), key=lambda place: str(rows[place]["label"])):
        text = full_text(rows[place])
        keys[place], above[text] = (text, above[text]), above[text] + 1
    return {keys[place]: row for place, row in enumerate(rows)}


def _group(runs: Sequence[_Setting], *, least: float) -> list[list[_Setting]]:
    """Group runs with the same task that share more than a fraction of their test rows."""
    groups: list[tuple[set[Key], list[_Setting]]] = []
    for run in runs:
        for number, (shared, group) in enumerate(groups):
            both = shared & run.rows.keys()
            if run.task.name == group[0].task.name and len(both) > least * max(
                len(shared), len(run.rows)
            ):
                groups[number] = both, [*group, run]
                break
        else:
            groups.append(({*run.rows}, [run]))
    return [group for _, group in groups]


def _align(runs: Sequence[_Setting]) -> tuple[list[_Setting], list[str]]:
    """Restrict runs to common rows, with the labels of one run, and add notes on both.

    Labels come from the last run with corrected labels, otherwise from the last run.
    """
    corrected = [run for run in runs if run.config.data.corrections or run.config.data.label_map]
    truth = [*runs, *corrected][-1]
    keys = [key for key in runs[0].rows if all(key in run.rows for run in runs)]
    names = [*dict.fromkeys(name for run in (truth, *runs) for name in run.task.class_names)]
    labels = {key: truth.rows[key]["label"] for key in keys}
    relabeled = sum(len({_names(run.rows[key]["label"]) for run in runs}) > 1 for key in keys)
    is_same = not relabeled and all(len(run.rows) == len(keys) for run in runs)
    aligned = []
    for run in runs:
        task, rows = replace(run.task, class_names=names), _relabel(run, labels, truth.task)
        compute = task.weighted_metrics([*rows.values()])
        metrics = {**(run.metrics if is_same else compute(np.ones(len(keys))))}
        resampled = bootstrap(compute, rows=len(keys))
        if relabeled:  # the loss for other labels is unknown
            del metrics["loss"], resampled["loss"]
        aligned.append(replace(run, task=task, rows=rows, metrics=metrics, resampled=resampled))
    notes = []
    if any(len(run.rows) > len(keys) for run in runs):
        notes.append(f"Only the {len(keys):,} test rows that all runs share are compared.")
    if relabeled:
        counts = f"{relabeled:,} of {len(keys):,} labels differ between runs"
        notes.append(f"{counts}. All runs are compared with the labels of {truth.path}.")
    return aligned, notes


def _names(label: Any) -> frozenset[Any]:
    return frozenset(np.atleast_1d(label).tolist())


def _relabel(run: _Setting, labels: Mapping[Key, Any], task: Task) -> dict[Key, Row]:
    """Relabel rows. Predictions of a renamed class remain correct."""
    new_names = defaultdict[str, set[str]](set)
    if task.problem_type == SINGLE:
        for key, label in labels.items():
            new_names[run.rows[key]["label"]].add(label)
    renamed = {
        old: min(new)
        for old, new in new_names.items()
        if len(new) == 1 and old not in task.class_numbers
    }

    rows: dict[Key, Row] = {}
    for key, label in labels.items():
        predicted = run.rows[key]["predicted"]
        new = renamed.get(predicted, predicted) if renamed else predicted
        rows[key] = {**run.rows[key], "label": label, "predicted": new}
    return rows


def finished_runs(path: Path) -> list[RunFolder]:
    """Return a run, the folds of a cross-validation, or the finished runs in a folder, by name."""
    runs = [_open(path)]
    if not runs[0].first_file.is_file():
        # Skip links, which would list a run twice.
        paths = [path for path in path.glob("*/") if not path.is_symlink()]
        several = filter(None, map(find_several, paths))
        paths += [run.path for folder in several if folder.kind == "seeds" for run in folder.runs]
        # Sort seed-9 before seed-10.
        paths.sort(key=lambda path: (path.name.rstrip("0123456789"), len(path.name), path.name))
        runs = [run for run in map(_open, paths) if run.first_file.is_file()]
    finished = [run for run in runs if run.has_finished]
    if not finished:
        problem = f"{path} is neither a finished run nor a folder of finished runs"
        raise NotARunError(
            problem if is_there(path) else f"folder not found: {path}",
            remedy="pass run folders, such as runs/trec-minilm-full, or "
            "finish the run with finetune run --resume-from-checkpoint",
        )
    for run in runs:
        if run not in finished:
            emit(WarningMessage(f"ignoring {run.path}, because it has not finished"))
    return finished


def _open(path: Path) -> RunFolder:
    several = find_several(path)
    return several if several and several.kind == "folds" else RunFolder(path)


def _compare_group(
    runs: Sequence[_Setting], *, reference: Reference, max_rows: int
) -> ComparedGroup:
    runs, notes = _align(runs)
    settings = _group_seeds(runs)
    base: _Setting | None = settings[0]
    if reference == "best":
        metric = runs[0].config.training.metric_for_best_model
        base = best_of({run: run.results for run in settings}, metric)
    if base is None:
        raise UsageError(
            "the best run is unknown, because some runs have no held-out validation split",
            remedy="use --reference first, or train with --validation-fraction 0.1",
        )
    compared = [
        run.describe(None if run is base else _compare_with(base, run, max_rows=max_rows))
        for run in settings
    ]
    has_seeds = any(run.seeds > 1 for run in compared)
    options = [run.options(with_seed=not has_seeds) for run in settings]
    columns = {name: [values[name] for values in options] for name in options[0]}
    differing = {name: row for name, row in columns.items() if row.count(row[0]) < len(row)}
    data, verdict = base.results[0].facts.data, _recommend(settings)
    return ComparedGroup(
        base.task, data, len(base.rows), base.name, compared, differing, notes, verdict
    )


def _group_seeds(runs: Sequence[_Setting]) -> list[_Setting]:
    """Merge runs that differ only in their seed, unless one run would be left, and name all."""
    # If runs are equal, keep runs in the same seeds folder together.
    ordered = sorted(runs, key=lambda run: find_several(run.path.parent) is None)
    seeds, repeats = Counter[str](), dict[_Setting, int]()
    for run in ordered:
        options = repr(run.options(with_seed=True))
        repeats[run], seeds[options] = seeds[options], seeds[options] + 1
    alike: dict[tuple[str, int], list[_Setting]] = {}
    for run in runs:
        key = repr(run.options(with_seed=False)), repeats[run]
        alike.setdefault(key, []).append(run)
    settings: list[_Setting] = []
    for group in alike.values():
        is_mergeable = len(alike) > 1 and len(group) > 1
        settings += [_Setting.merge(group)] if is_mergeable else group
    are_unique = len({run.path.name for run in settings}) == len(settings)
    names = [run.path.name if are_unique else str(run.path) for run in settings]
    counts = [len(run.seeds) for run in settings]
    return [
        replace(run, name=f"{name} ({count} seeds)" if count > 1 else name)
        for run, name, count in zip(settings, names, counts, strict=True)
    ]


def _recommend(runs: Sequence[_Setting]) -> str:
    """Recommend the best run by the first metric, or list runs that can't be told apart."""
    metric = next(iter(runs[0].metrics))
    best, *others = sorted(runs, key=lambda run: -run.metrics[metric])
    close = []
    for run in others:
        versus = _compare_with(run, best, max_rows=0)
        p_value = versus.p_value if METRICS[metric].is_proportion else None
        if versus.differences[metric].low <= 0 or (p_value or 0) > 1 - CONFIDENCE:
            close.append(run.name)
    if close:
        names, rows = ", ".join([best.name, *close[:-1]]), len(best.rows)
        return f"{names} and {close[-1]} can't be told apart on {rows:,} rows."
    if others:
        return f"Use {best.name}: its difference from {others[0].name} is significant."
    return ""


def _compare_with(base: _Setting, run: _Setting, *, max_rows: int) -> PairedComparison:
    task, before, now = base.task, [*base.rows.values()], [*run.rows.values()]
    errors, base_errors = task.row_errors(now), task.row_errors(before)
    is_better, is_worse = errors < base_errors, errors > base_errors
    if task.class_names:
        is_better, is_worse = is_better & (errors == 0), is_worse & (base_errors == 0)

    def differing_rows(mask: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """Return the rows that differ most. Equal rows keep their order."""
        gaps = np.where(mask, np.abs(errors - base_errors), 0)
        order = np.argsort(-gaps, kind="stable")[:max_rows]
        return [
            {
                "row": now[place].get("row"),
                "text": text_of(now[place]),
                "label": now[place]["label"],
                "reference": before[place]["predicted"],
                "run": now[place]["predicted"],
            }
            for place in order[gaps[order] > 0].tolist()
        ]

    is_pair = not base.seeds and not run.seeds
    better, worse = int(is_better.sum()), int(is_worse.sum())
    differences = {
        name: percentile_interval(
            run.metrics[name] - base.metrics[name], values - base.resampled[name]
        )
        for name, values in run.resampled.items()
    }
    p_value = mcnemar_p_value(better, worse) if task.class_names and is_pair else None
    rows = differing_rows(is_better), differing_rows(is_worse)
    return PairedComparison(differences, better, worse, p_value, *rows)


def tabulate(group: ComparedGroup) -> Iterator[Table]:
    """Yield tables: a ranking and, for several runs, differing metrics, rows and options."""
    yield _rank(group)
    if len(group.runs) > 1:
        yield _tabulate_metrics(group)
    how = "correct" if group.task.class_names else "closer"
    compared = [(run, versus) for run in group.runs if (versus := run.versus_reference)]
    if compared:
        yield Table(
            f"Rows where only one run is {how}",
            ("run", f"only {group.reference} {how}", f"only run {how}", "McNemar's p"),
            [
                (run.name, *map(format_value, (versus.worse, versus.better, versus.p_value)))
                for run, versus in compared
            ],
            note="The p-value is from McNemar's exact test, two-sided. With several seeds, the "
            "rows are from the first.",
        )
    if group.options:
        columns = ("option", *(run.name for run in group.runs))
        rows = [
            (option.replace("_", " "), *map(format_value, values))
            for option, values in group.options.items()
        ]
        yield Table("Differing options", columns, rows, text_columns=len(columns))
    for run, versus in compared:
        columns = ("text", "true", group.reference, run.name)
        for name, count, listed in (
            (run.name, versus.better, versus.better_rows),
            (group.reference, versus.worse, versus.worse_rows),
        ):
            keys = ("text", "label", "reference", "run")
            cells = [[format_value(row[key]) for key in keys] for row in listed]
            note = f"{len(listed):,} of {count:,} rows." if len(listed) < count else ""
            if listed:
                yield Table(f"Only {name} {how}", columns, cells, text_columns=4, note=note)


def _rank(group: ComparedGroup) -> Table:
    """Rank the runs by the first metric, with their costs."""
    metric = METRICS[next(iter(group.runs[0].metrics))]
    has_seeds = any(run.spread is not None for run in group.runs)

    def show(value: float) -> str:
        return str(MetricValue(metric, value))

    rows = []
    for run in sorted(group.runs, key=lambda run: -run.metrics[metric.name]):
        interval = f"{show(run.interval.low)}–{show(run.interval.high)}"
        spread = ["–" if run.spread is None else f"± {show(run.spread)}"] if has_seeds else []
        time_per_text = f"{run.ms_per_text:.2g} ms" if run.ms_per_text else "–"
        costs = duration(run.train_seconds), f"{run.parameters / 1e6:,.1f} M", time_per_text
        rows.append((run.name, show(run.metrics[metric.name]), interval, *spread, *costs))
    spread = ["over seeds"] if has_seeds else []
    columns = ("run", metric.title, "95% CI", *spread, "training", "size", "per text")
    return Table(f"{group.samples:,} test rows of {group.data}", columns, rows)


def _tabulate_metrics(group: ComparedGroup) -> Table:
    rows = []
    for name in group.runs[0].metrics:
        metric, title = METRICS[name], capitalize(METRICS[name].title)
        for run in (run for run in group.runs if name in run.metrics):
            versus, shown = run.versus_reference, ""
            if versus and (difference := versus.differences.get(name)):
                low, value, high = (
                    f"{100 * end:+.1f}"
                    if metric.is_fraction
                    else format_number(end, sign="+", digits=3)
                    for end in (difference.low, difference.value, difference.high)
                )
                shown = f"{value} [{low}, {high}]".replace("-", "−")
            rows.append((title, run.name, str(MetricValue(metric, run.metrics[name])), shown))
            title = ""
    note = (
        "Differences are paired: both models are scored on the same resamples of the test rows. "
        "Brackets show the 95% bootstrap interval. If it contains 0, the difference may be noise. "
        "With many comparisons, some differences look significant by chance."
    )
    columns = ("metric", "run", "value", f"difference from {group.reference}")
    return Table("All metrics", columns, rows, text_columns=2, note=note)
