"""One pass over a table: everything that the other files of this room find, as records."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, DatasetDict, concatenate_datasets
from numpy.typing import NDArray

from finetune.audit.classes import find_merges
from finetune.audit.curve import Curve, choose_to_label, measure_curve
from finetune.audit.duplicates import MAX_COMPARED_ROWS, Pairs, find_near_duplicates
from finetune.audit.heads import count_tokens, mix_logits, one_thread, predict_out_of_fold
from finetune.audit.outliers import find_outliers
from finetune.audit.suspects import estimate_wrong, nearest_rows, rank_suspects
from finetune.config.schema import Config, DataConfig
from finetune.data.dataset import LoadedData, column_of, make_dataset, rows_where, texts_of
from finetune.data.load import load_data
from finetune.data.split import sample_rows
from finetune.data.stream import read_rows
from finetune.errors import DataError
from finetune.evaluation.statistics import Interval
from finetune.events import Emit, WarningMessage, stage
from finetune.runs.expectation import prepare_head, read_frozen_features
from finetune.runs.folds import read_out_of_fold
from finetune.runs.preparation import Preparation
from finetune.tasks.base import Logits, Task
from finetune.tasks.metrics import SINGLE
from finetune.tasks.regression import Regression
from finetune.training.linear_head import LabelledFeatures, choose_strength, solve

# Of a table; more are sampled, and that is said.
MAX_ROWS = 100_000
# The fraction of rows that is listed as suspects.
LISTED = 0.1
# The order in which a cross-validation counts rows.
SPLITS = ("train", "validation", "test")

Record = Mapping[str, Any]
"""A row that was found: its ``split``, its number in that table from 0, its text, and more."""


@dataclass(frozen=True)
class Audit:
    """What was found. Without labels only duplicates, outliers and what to label are there."""

    data: str
    model: str
    rows: int
    sampled: int
    classes: Mapping[str, int]
    suspects: Sequence[Record] = ()
    estimated_wrong: Interval | None = None
    """How many labels; of several a row each counts."""
    merges: Sequence[Record] = ()
    near_duplicates: Sequence[Record] = ()
    leaks: Sequence[Record] = ()
    outliers: Sequence[Record] = ()
    curve: Curve | None = None
    to_label: Sequence[str] = ()
    notes: Sequence[str] = ()
    folder: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune data audit --json`` prints."""
        return {**asdict(self), "to_label": len(self.to_label)}


@dataclass(frozen=True)
class _Table:
    """All rows, or a sample of ``total``; splits and numbers are [rows]."""

    rows: Dataset
    task: Task
    splits: NDArray[np.str_]
    numbers: NDArray[np.int64]
    total: int
    has_labels: bool = True

    @cached_property
    def texts(self) -> pyarrow.Array:
        return texts_of(self.rows).joined.combine_chunks()

    def records(self, rows: NDArray[np.int64], **columns: Any) -> list[Record]:
        """Return some rows as records, with more columns."""
        own = {"split": self.splits[rows], "row": self.numbers[rows]}
        texts = self.texts.take(pyarrow.array(rows))
        found: list[Record] = pyarrow.table({**own, **columns, "text": texts}).to_pylist()
        return found


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
        out_of_fold: The folder of a cross-validation, whose predictions go into the mean.
        unlabelled: Texts of which those to label next are chosen, ``batches`` times ``batch``.
    """
    with stage("data", emit):
        table = _load_table(config, emit=emit)
    task, has_labels, count = table.task, table.has_labels, len(table.rows)
    with stage("features", emit):
        preparation, features = _read_features(config, table.rows, task, emit=emit)
    with stage("duplicates", emit):
        pairs = find_near_duplicates(table.texts, features.features)
        outliers, deviations, reasons = find_outliers(table.texts, features.features)
    duplicates = _describe_pairs(table, pairs)
    sampled = f"{count:,} of the {table.total:,} rows were sampled" if count < table.total else ""
    many = "near duplicates were found by their words alone" if count > MAX_COMPARED_ROWS else ""
    found = Audit(
        data=config.data.data,
        model=config.model.model,
        rows=table.total,
        sampled=count,
        classes=task.count_classes(features.labels) if has_labels else {},
        outliers=table.records(outliers, reason=reasons, deviations=deviations),
        near_duplicates=[one for one in duplicates if one["split"] == one["of_split"]],
        leaks=[one for one in duplicates if one["split"] != one["of_split"]],
        notes=[*filter(None, (sampled, many))],
    )
    if has_labels:
        groups = pairs.groups(count)
        with stage("heads", emit), one_thread():
            tokens = count_tokens(preparation.examples["train"], outputs=features.outputs)
            logits = predict_out_of_fold(features, tokens, groups, folds=folds)
            if out_of_fold is not None and count == table.total:
                logits = mix_logits(logits, read_out_of_fold(out_of_fold), task, features.labels)
        with stage("curve", emit), one_thread():
            curve = measure_curve(task, features, groups)
        found = replace(found, curve=curve, **_judge(table, features, logits))
    if unlabelled is not None:
        known = set(table.texts.to_pylist())
        texts = [*dict.fromkeys(_read_texts(unlabelled, config.data, emit=emit))]
        texts = [text for text in texts if text not in known]
        with stage("unlabelled", emit):
            _, given = _read_features(config, *_without_labels(texts), emit=emit)
        probabilities = None
        if has_labels:
            with one_thread():
                head = solve(features, strength=choose_strength(features, seed=0)[0])
            probabilities = task.read_logits(head.logits(given.features)).probabilities
        chosen = choose_to_label(given.features, probabilities, batch=batch, batches=batches)
        found = replace(found, to_label=[texts[number] for number in chosen.tolist()])
    return found


def _load_table(config: Config, *, emit: Emit) -> _Table:
    """Load all rows, or a sample; those without labels get zeros."""
    path = Path(config.data.data).expanduser()
    try:
        loaded = load_data(config.data, emit=emit)
        trained = loaded.task.labels(column_of(loaded.splits["train"], "label"))
        has_labels = bool((trained != trained[0]).any())
        if not has_labels:
            emit(WarningMessage("all training rows have the same label: labels can't be audited"))
    except DataError as error:
        if config.data.label_column is not None or not path.is_file():
            raise
        rows, task = _without_labels(_read_texts(path, config.data, emit=emit))
        emit(WarningMessage(f"no labels are audited: {error.message}", remedy=error.remedy))
        loaded, has_labels = LoadedData(DatasetDict(train=rows), task), False
    names = [name for name in SPLITS if name in loaded.splits]
    rows = concatenate_datasets([loaded.splits[name] for name in names])
    splits = np.repeat(names, [len(loaded.splits[name]) for name in names])
    numbers = np.concatenate([loaded.numbers_of(name) for name in names])
    total, labels = len(rows), loaded.task.labels(column_of(rows, "label"))
    if total > MAX_ROWS:
        kept = sample_rows(loaded.task.strata(labels), rows=MAX_ROWS, seed=0)
        rows, splits, numbers = rows_where(rows, kept), splits[kept], numbers[kept]
        labels = labels[kept]
    return _Table(rows, loaded.task.with_loss(labels), splits, numbers, total, has_labels)


def _read_texts(path: Path, options: DataConfig, *, emit: Emit) -> list[str]:
    pieces = read_rows(path.expanduser(), options, as_lines=False, emit=emit)
    return [row.text for piece in pieces for row in piece]


def _without_labels(texts: Sequence[str]) -> tuple[Dataset, Task]:
    task = Regression()
    return make_dataset(texts, ["0"] * len(texts), task=task), task


def _read_features(
    config: Config, rows: Dataset, task: Task, *, emit: Emit
) -> tuple[Preparation, LabelledFeatures]:
    config = replace(config, training=replace(config.training, class_weights="none"))
    preparation = prepare_head(config, rows, task, samples=False, emit=emit)
    return preparation, read_frozen_features(preparation, emit=emit)


def _describe_pairs(table: _Table, pairs: Pairs) -> list[Record]:
    """Return pairs of rows that say the same, those with contradictory labels first."""
    labels = table.task.labels(column_of(table.rows, "label"))
    first, second = labels[pairs.first], labels[pairs.second]
    differ = first != second
    differ = differ if differ.ndim == 1 else differ.any(axis=1)
    differ &= bool(table.task.class_names) and table.has_labels
    both = zip(*map(table.task.to_json, (first, second)), strict=True)
    found = table.records(
        pairs.second,
        of_split=table.splits[pairs.first],
        of_row=table.numbers[pairs.first],
        of_text=table.texts.take(pyarrow.array(pairs.first)),
        similarity=pairs.similarity,
        labels=[own if is_odd else () for own, is_odd in zip(both, differ, strict=True)],
    )
    return sorted(found, key=lambda one: (not one["labels"], -one["similarity"]))


def _judge(table: _Table, features: LabelledFeatures, logits: Logits) -> dict[str, Any]:
    """Return suspects, how many labels are wrong, and classes to merge."""
    task, labels, outputs = table.task, features.labels, table.task.read_logits(logits)
    order, losses = rank_suspects(task, logits, labels)
    listed = order[: int(np.ceil(LISTED * len(labels)))]
    predicted, probabilities = outputs.predicted, outputs.probabilities
    columns: dict[str, Any] = {
        "label": task.to_json(labels[listed]),
        "suggested": task.to_json(predicted[listed]),
        "loss": losses[listed],
    }
    wrong, merges = None, []
    if task.problem_type == SINGLE and probabilities is not None:
        columns["probability"] = probabilities[listed, labels[listed]].astype(float)
        columns["suggested_probability"] = probabilities[listed, predicted[listed]].astype(float)
        near = nearest_rows(features.features, labels, listed, predicted[listed])
        columns["nearest"] = [table.numbers[own].tolist() for own in near]
        wrong = estimate_wrong(probabilities, labels)
        merges = [asdict(one) for one in find_merges(task.class_names, probabilities, labels)]
    elif probabilities is not None:
        # Of several labels each is right or wrong.
        cells = probabilities.ravel()
        wrong = estimate_wrong(np.stack([1 - cells, cells], axis=1), labels.ravel().astype(int))
    suspects = table.records(listed, **columns)
    return {"suspects": suspects, "estimated_wrong": wrong, "merges": merges}
