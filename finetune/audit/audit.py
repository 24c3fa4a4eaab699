"""One pass over a table: everything that the other files of this room find, by row numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, DatasetDict, concatenate_datasets
from numpy.typing import NDArray

from finetune.audit.classes import Merge, find_merges
from finetune.audit.curve import Curve, choose_to_label, measure_curve
from finetune.audit.duplicates import MAX_COMPARED_ROWS, Pairs, find_near_duplicates
from finetune.audit.heads import count_tokens, predict_out_of_fold
from finetune.audit.outliers import find_outliers
from finetune.audit.suspects import estimate_wrong, nearest_rows, rank_suspects
from finetune.config.schema import Config, DataConfig
from finetune.data.dataset import (
    LoadedData,
    column_of,
    make_dataset,
    return_freed_memory,
    rows_where,
    texts_of,
)
from finetune.data.load import load_data
from finetune.data.split import sample_rows
from finetune.data.stream import read_rows
from finetune.errors import DataError
from finetune.evaluation.statistics import Interval
from finetune.events import Emit, Info, WarningMessage, stage
from finetune.runs.expectation import prepare_head, read_frozen_features
from finetune.runs.folds import read_out_of_fold
from finetune.tasks.base import Logits, Task
from finetune.tasks.metrics import MULTI, SINGLE
from finetune.tasks.regression import Regression
from finetune.training.linear_head import LabelledFeatures, choose_strength, solve

# Of the table; more are sampled, and that is said.
MAX_ROWS = 100_000
# The fraction of rows that is listed as suspects.
LISTED = 0.1
# Of the mean with the heads' logits.
# The order in which a cross-validation counts rows.
SPLITS = ("train", "validation", "test")
RUN_WEIGHT, LOWEST = 0.5, 1e-6


@dataclass(frozen=True)
class Place:
    """A row: its number in the table of a split, from 0, and its text."""

    split: str
    row: int
    text: str


@dataclass(frozen=True)
class Suspect(Place):
    """A label that may be wrong, and what heads that have not seen it say; None of numbers."""

    label: Any
    suggested: Any
    loss: float
    probability: float | None = None
    suggested_probability: float | None = None
    nearest: Sequence[Place] = ()


@dataclass(frozen=True)
class Duplicate(Place):
    """A row that says the same as an earlier one; their labels, where they differ."""

    of: Place
    similarity: float
    labels: Sequence[Any] = ()


@dataclass(frozen=True)
class Outlier(Place):
    """A row unlike the rest: how many deviations it is off, and why, if that is known."""

    deviations: float
    reason: str


@dataclass(frozen=True)
class Audit:
    """What was found. Without labels only duplicates, outliers and what to label are there."""

    data: str
    model: str
    rows: int
    sampled: int
    classes: Mapping[str, int]
    suspects: Sequence[Suspect] = ()
    estimated_wrong: Interval | None = None
    merges: Sequence[Merge] = ()
    near_duplicates: Sequence[Duplicate] = ()
    leaks: Sequence[Duplicate] = ()
    outliers: Sequence[Outlier] = ()
    curve: Curve | None = None
    to_label: Sequence[str] = ()
    notes: Sequence[str] = ()
    folder: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune data audit --json`` prints."""
        found, wrong = asdict(self), self.estimated_wrong
        if wrong:
            ends = {name: round(share * self.sampled) for name, share in asdict(wrong).items()}
            found["estimated_wrong"] = {**ends, "share": wrong.value, "method": METHOD}
        return {**found, "to_label": len(self.to_label)}


METHOD = (
    "labels that disagree with the surest predictions of each class, by heads that have not seen "
    "the row; 95% interval"
)


@dataclass(frozen=True)
class _Rows:
    """All rows of a table with the task; splits and numbers are [rows]."""

    table: Dataset
    task: Task
    splits: NDArray[np.str_]
    numbers: NDArray[np.int64]
    has_labels: bool = True

    @cached_property
    def texts(self) -> pyarrow.ChunkedArray:
        return texts_of(self.table).joined.combine_chunks()

    def place(self, row: int) -> dict[str, Any]:
        text = self.texts[row].as_py()
        return {"split": str(self.splits[row]), "row": int(self.numbers[row]), "text": text}


def audit(
    config: Config,
    *,
    folds: int = 5,
    out_of_fold: Path | None = None,
    unlabelled: Path | None = None,
    batch: int = 50,
    batches: int = 5,
    emit: Emit,
) -> Audit:
    """Audit all rows of the data of a configuration with heads on its frozen encoder.

    Args:
        folds: Parts of the rows; a part's predictions are those of heads that saw the others.
        out_of_fold: The folder of a cross-validation, whose models' logits go into the mean.
        unlabelled: Texts of which those to label next are chosen, ``batches`` times ``batch``.
    """
    with stage("data", emit):
        rows, total = _load_rows(config, emit=emit)
    config = replace(config, training=replace(config.training, class_weights="none"))
    table, task = rows.table, rows.task
    labels = task.labels(column_of(table, "label"))
    task = task.with_loss(labels)
    with stage("features", emit):
        preparation = prepare_head(config, table, task, samples=False, emit=emit)
        features = read_frozen_features(preparation, emit=emit)
    with stage("duplicates", emit):
        pairs = find_near_duplicates(rows.texts, features.features)
        outliers = find_outliers(rows.texts, features.features)
        return_freed_memory()
    notes = []
    if len(table) < total:
        notes.append(
            f"{len(table):,} of the {total:,} rows were sampled; the rest was not looked at"
        )
    if len(table) > MAX_COMPARED_ROWS:
        notes.append("near duplicates were found by their words alone, the rows being many")
    duplicates = _describe_pairs(rows, pairs)
    found = Audit(
        data=config.data.data,
        model=config.model.model,
        rows=total,
        sampled=len(table),
        classes=task.count_classes(labels) if rows.has_labels else {},
        outliers=[
            Outlier(**rows.place(one), deviations=far, reason=why) for one, far, why in outliers
        ],
        near_duplicates=[one for one in duplicates if one.split == one.of.split],
        leaks=[one for one in duplicates if one.split != one.of.split],
    )
    if rows.has_labels:
        groups = pairs.groups(len(table))
        with stage("heads", emit):
            tokens = count_tokens(preparation.examples["train"], outputs=features.outputs)
            logits = predict_out_of_fold(features, tokens, groups, folds=folds)
        if out_of_fold is not None and len(table) == total:
            logits = _mix(logits, out_of_fold, task)
        with stage("curve", emit):
            curve = measure_curve(task, features, groups)
        found = replace(found, curve=curve, **_judge(rows, task, features, logits))
    if unlabelled is not None:
        with stage("unlabelled", emit):
            texts = _choose_texts(config, rows, features, unlabelled, batch, batches, emit=emit)
        found = replace(found, to_label=texts)
    return replace(found, notes=notes)


def _load_rows(config: Config, *, emit: Emit) -> tuple[_Rows, int]:
    """Return all rows or a sample, with how many there are; without labels as zeros."""
    try:
        loaded, has_labels = load_data(config.data, emit=emit), True
        trained = loaded.task.labels(column_of(loaded.splits["train"], "label"))
        if (trained == trained[0]).all():
            emit(WarningMessage("all training rows have the same label: labels can't be audited"))
            has_labels = False
    except DataError as error:
        if (
            config.data.label_column is not None
            or not Path(config.data.data).expanduser().is_file()
        ):
            raise
        loaded, has_labels = _load_texts(config.data, error, emit=emit), False
    tables = {name: loaded.splits[name] for name in SPLITS if name in loaded.splits}
    table, task = concatenate_datasets(list(tables.values())), loaded.task
    splits = np.repeat([*tables], [*map(len, tables.values())])
    numbers = np.concatenate([loaded.numbers_of(split) for split in tables])
    total = len(table)
    if not has_labels:
        task = Regression()
        texts = texts_of(table)
        zeros = pyarrow.array(np.zeros(total))
        table = make_dataset(texts.texts, zeros.cast("string"), task=task, pairs=texts.pairs)
    if total > MAX_ROWS:
        strata = task.strata(task.labels(column_of(table, "label")))
        kept = sample_rows(strata, rows=MAX_ROWS, seed=config.data.split_seed)
        table, splits, numbers = rows_where(table, kept), splits[kept], numbers[kept]
        emit(Info(f"{MAX_ROWS:,} of {total:,} rows sampled"))
    return _Rows(table, task, splits, numbers, has_labels), total


def _load_texts(options: DataConfig, error: DataError, *, emit: Emit) -> LoadedData:
    path = Path(options.data).expanduser()
    try:
        pieces = read_rows(path, options, as_lines=False, emit=emit)
        texts = [row.text for piece in pieces for row in piece]
    except DataError:
        raise error from None
    emit(WarningMessage(f"no labels are audited: {error.message}", remedy=error.remedy))
    task = Regression()
    table = make_dataset(texts, ["0"] * len(texts), task=task)
    return LoadedData(DatasetDict(train=table), task)


def _describe_pairs(rows: _Rows, pairs: Pairs) -> list[Duplicate]:
    """Return pairs of rows that say the same, those with contradictory labels first."""
    labels = rows.task.to_json(rows.task.labels(column_of(rows.table, "label")))
    columns = (one.tolist() for one in (pairs.first, pairs.second, pairs.similarity))
    found = []
    for first, second, similarity in zip(*columns, strict=True):
        both = [labels[first], labels[second]]
        both = both if rows.task.class_names and both[0] != both[1] else []
        of = Place(**rows.place(first))
        found.append(Duplicate(**rows.place(second), of=of, similarity=similarity, labels=both))
    return sorted(found, key=lambda own: (not own.labels, -own.similarity))


def _mix(logits: Logits, path: Path, task: Task) -> Logits:
    """Return the mean of the heads' logits with those of a cross-validation of the same rows."""
    found = read_out_of_fold(path)
    given = found.outputs.probabilities
    if given is None or list(found.task.class_names) != list(task.class_names):
        return logits
    chances = np.clip(given, LOWEST, 1 - LOWEST)
    of_run = np.log(chances) - (np.log1p(-chances) if task.problem_type == MULTI else 0)
    mixed = logits.copy()
    # The rows of a test file come last, and are in no fold.
    here = found.rows < len(logits)
    rows = found.rows[here]
    mixed[rows] = (1 - RUN_WEIGHT) * logits[rows] + RUN_WEIGHT * of_run[here]
    return mixed


def _judge(rows: _Rows, task: Task, features: LabelledFeatures, logits: Logits) -> dict[str, Any]:
    """Return suspects, how many labels are wrong, and classes to merge."""
    labels, outputs = features.labels, task.read_logits(logits)
    order, losses = rank_suspects(task, logits, labels)
    listed = order[: int(np.ceil(LISTED * len(labels)))]
    given, suggested = task.to_json(labels[listed]), task.to_json(outputs.predicted[listed])
    of_given: Sequence[float | None] = [None] * len(listed)
    of_suggested: Sequence[float | None] = of_given
    nearest: list[list[int]] = [[] for _ in listed]
    wrong, merges = None, []
    probabilities = outputs.probabilities
    if task.problem_type == SINGLE and probabilities is not None:
        best = outputs.predicted[listed]
        of_given = probabilities[listed, labels[listed]].tolist()
        of_suggested = probabilities[listed, best].tolist()
        nearest = nearest_rows(features.features, labels, listed, best)
        wrong = estimate_wrong(probabilities, labels)
        merges = find_merges(task.class_names, probabilities, labels)
    elif task.problem_type == MULTI and probabilities is not None:
        of_classes = [
            estimate_wrong(np.stack([1 - own, own], axis=1), labels[:, number].astype(np.int64))
            for number, own in enumerate(probabilities.T)
        ]
        wrong = _sum([one for one in of_classes if one])
    columns = zip(
        listed.tolist(),
        given,
        suggested,
        losses[listed].tolist(),
        of_given,
        of_suggested,
        nearest,
        strict=True,
    )
    suspects = [
        Suspect(**rows.place(row), label=label, suggested=best, loss=loss, probability=own,
                suggested_probability=other, nearest=[Place(**rows.place(one)) for one in near])
        for row, label, best, loss, own, other, near in columns
    ]  # fmt: skip
    return {"suspects": suspects, "estimated_wrong": wrong, "merges": merges}


def _sum(intervals: Sequence[Interval]) -> Interval | None:
    """Return the fraction of rows with a wrong label in any class, at most."""
    if not intervals:
        return None
    value = min(sum(one.value for one in intervals), 1.0)
    down = sum((one.value - one.low) ** 2 for one in intervals) ** 0.5
    up = sum((one.high - one.value) ** 2 for one in intervals) ** 0.5
    return Interval(value, max(value - down, 0.0), min(value + up, 1.0))


def _choose_texts(
    config: Config,
    rows: _Rows,
    features: LabelledFeatures,
    path: Path,
    batch: int,
    batches: int,
    *,
    emit: Emit,
) -> list[str]:
    """Return the texts of a file that are to be labelled next, without those of the table."""
    pieces = read_rows(path.expanduser(), config.data, as_lines=False, emit=emit)
    known = set(rows.texts.to_pylist())
    texts = [*dict.fromkeys(row.text for piece in pieces for row in piece if row.text not in known)]
    if not texts:
        return []
    task = Regression()
    table = make_dataset(texts, ["0"] * len(texts), task=task)
    given = read_frozen_features(
        prepare_head(config, table, task, samples=False, emit=emit), emit=emit
    )
    probabilities = None
    if rows.has_labels:
        strength, _ = choose_strength(features, seed=0)
        logits = solve(features, strength=strength).logits(given.features)
        probabilities = rows.task.read_logits(logits).probabilities
        if rows.task.problem_type == MULTI and probabilities is not None:
            unsure = np.abs(probabilities - 0.5).min(axis=1)
            probabilities = np.stack([0.5 - unsure, 0.5 + unsure], axis=1)
    chosen = choose_to_label(given.features, probabilities, batch=batch, batches=batches)
    return [texts[number] for number in chosen.tolist()]
