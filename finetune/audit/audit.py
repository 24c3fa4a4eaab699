"""Audit a table in one pass over its texts, with linear heads on features of the frozen encoder."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, DatasetDict, concatenate_datasets
from numpy.typing import NDArray

from finetune.audit.duplicates import Pairs, find_near_duplicates, normalize_rows
from finetune.config.schema import Config, DataConfig
from finetune.data.corrections import KEEP, key_of, read_decisions
from finetune.data.dataset import (
    SPLITS,
    LoadedData,
    column_of,
    find_folds,
    make_dataset,
    rows_where,
    sample_rows,
    texts_of,
)
from finetune.data.load import load_data, load_splits
from finetune.data.stream import read_texts
from finetune.errors import DataError
from finetune.events import Info, WarningMessage, emit, stage
from finetune.runs.linear_head import prepare_head, read_frozen_features
from finetune.runs.several import read_out_of_fold
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.labels import HARD
from finetune.tasks.metrics import MULTI, SINGLE
from finetune.tasks.regression import Regression
from finetune.tasks.tables import full_text
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    TRIED_GRADIENT,
    LabeledFeatures,
    LinearHead,
    choose_inverse_regularization,
    fit_linear_head,
)

# Larger tables are sampled.
MAX_ROWS = 100_000
# The fraction of rows that is listed as suspects.
LISTED_FRACTION = 0.1
SEEDS = 3
LOWEST_PROBABILITY = 1e-6
# Above this many features times outputs, the heads would take a minute per seed.
MAX_WORK = 1.2e8
# The sizes of the learning curve, the folds that it averages, and its fewest rows.
SIZES, DRAWS, MIN_ROWS = 7, 5, 50
SMALLEST_FRACTION = 0.05
# Above this many features times outputs, rows of the curve are sampled.
MAX_CURVE_WORK = 6e7
TIMES_AS_MANY = (2, 4)
Z_90 = 1.645
# Fraction of the forecast gain that is added to the interval, because the law may be wrong.
LAW_ERROR = 0.25
# The density of texts is estimated on a sample. Typical texts teach a model more than outliers.
SAMPLED_TEXTS, MAX_TEXTS = 1_000, 20_000

Record = Mapping[str, Any]
"""A row of the table: its split, its number there, its id, its place, its text, and more."""
Curve = Mapping[str, Any]
"""The ``metric`` of a learning curve, its measured ``points`` and a ``forecast``.

Each point has the number of ``rows``, the ``value`` of the metric, and the ends ``low`` and
``high`` of its 90% interval.
"""


@dataclass(frozen=True)
class Audit:
    """The result. Without labels, it has only duplicates and texts to label.

    ``decided`` are rows of the corrections, with their decision, which are no suspects again.
    ``splits`` has the rows of each split of the table, or of the run that was audited.
    """

    data: str
    model: str
    rows: int
    sampled: int
    classes: Mapping[str, int]
    splits: Mapping[str, int]
    suspects: Sequence[Record] = ()
    decided: Sequence[Record] = ()
    near_duplicates: Sequence[Record] = ()
    leaks: Sequence[Record] = ()
    curve: Curve | None = None
    to_label: Sequence[str] = ()
    folder: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune data audit --json`` prints."""
        return {**asdict(self), "to_label": len(self.to_label)}


@dataclass(frozen=True)
class _Table:
    """All rows, or a sample of ``total``. Splits have the shape [rows]."""

    rows: Dataset
    task: Task
    splits: NDArray[np.str_]
    total: int
    places: Mapping[str, Callable[[int], str]]
    has_labels: bool = True
    is_chosen: bool = False  # by finetune label

    @cached_property
    def texts(self) -> pyarrow.Array:
        return texts_of(self.rows).joined.combine_chunks()

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The number of each row in its table: [rows]."""
        return np.asarray(column_of(self.rows, "row").to_numpy())

    def records(self, rows: NDArray[np.int64], **columns: Any) -> list[Record]:
        """Return some rows as records, with more columns."""
        where: dict[str, Any] = {"split": self.splits[rows], "row": self.numbers[rows]}
        if "id" in self.rows.column_names:
            where["id"] = column_of(self.rows, "id").take(pyarrow.array(rows))
        if self.places:
            # Splits that a run holds out come from the table of the training rows.
            of_split = [self.places.get(split, self.places["train"]) for split in self.splits[rows]]
            numbers = zip(of_split, where["row"].tolist(), strict=True)
            where["place"] = [place(number) for place, number in numbers]
        texts = self.texts.take(pyarrow.array(rows))
        records: list[Record] = pyarrow.table({**where, **columns, "text": texts}).to_pylist()
        return records


def audit(
    config: Config,
    *,
    folds: int = 5,
    is_run: bool = False,
    out_of_fold: Path | None = None,
    unlabeled: Path | None = None,
    batch: int = 50,
    batches: int = 5,
) -> Audit:
    """Audit all rows of the data with linear heads on the frozen encoder.

    If the options are from a run, the rows are in its splits. ``out_of_fold`` is the folder of a
    cross-validation whose predictions are used as well. From a file of ``unlabeled`` texts,
    ``batches`` times ``batch`` are chosen for labeling.
    """
    with stage("data"):
        table = _load_table(config, is_run=is_run)
    with stage("features"):
        features = _read_features(config, table.rows, table.task)
    with stage("duplicates"):
        pairs = find_near_duplicates(table.texts, features.features)
    duplicates = _describe_pairs(table, pairs)
    result = Audit(
        data=config.data.data,
        model=config.model.model,
        rows=table.total,
        sampled=len(table.rows),
        classes=table.task.count_classes(features.labels) if table.has_labels else {},
        splits=dict(Counter(table.splits.tolist())),
        near_duplicates=[pair for pair in duplicates if pair["split"] == pair["of_split"]],
        leaks=[pair for pair in duplicates if pair["split"] != pair["of_split"]],
    )
    if table.has_labels:
        groups = pairs.groups(len(table.rows))
        with stage("heads"):
            logits = predict_out_of_fold(features, groups, folds=folds)
            if out_of_fold is not None and len(table.rows) == table.total:
                logits = _mix_with_folds(logits, table, out_of_fold)
        if table.is_chosen:
            emit(Info(f"no learning curve: most rows were chosen {HARD}"))
        else:
            with stage("curve"):
                curve = measure_curve(table.task, features, groups)
            result = replace(result, curve=curve)
        suspects = _list_suspects(table, features, logits)
        if corrections := config.data.corrections:
            decided = read_decisions(Path(corrections).expanduser(), table.task.class_names)
            known = {
                key_of(row["text"], row["label"] if row["decision"] == KEEP else row["decision"])
                for row in decided
            }
            suspects = [row for row in suspects if key_of(row["text"], row["label"]) not in known]
            result = replace(result, decided=decided)
        result = replace(result, suspects=suspects)
    if unlabeled is not None:
        texts = _choose_texts(config, table, features, unlabeled, batch=batch, batches=batches)
        result = replace(result, to_label=texts)
    return result


def _choose_texts(
    config: Config, table: _Table, features: LabeledFeatures, path: Path, **sizes: int
) -> list[str]:
    """Return the texts of a file that are most useful to label and not in the table."""
    known = set(table.texts.to_pylist())
    texts = [text for text in dict.fromkeys(_texts_in(path, config.data)) if text not in known]
    with stage("unlabeled"):
        pool = _read_features(config, *_without_labels(texts)).features
    probabilities = None
    if table.has_labels:
        inverse_regularization, _ = choose_inverse_regularization(features, seed=0)
        head = fit_linear_head(features, inverse_regularization=inverse_regularization)
        probabilities = table.task.read_logits(head.logits(pool)).probabilities
    return [texts[row] for row in choose_to_label(pool, probabilities, **sizes).tolist()]


def _load_table(config: Config, *, is_run: bool) -> _Table:
    """Load all rows, or a sample. Rows of a table without labels get zeros."""
    path = Path(config.data.data).expanduser()
    try:
        loaded, has_labels = (load_splits if is_run else load_data)(config.data), True
    except DataError as error:
        if config.data.label_column is not None or not path.is_file():
            raise
        rows, task = _without_labels(_texts_in(path, config.data))
        emit(WarningMessage(f"labels are not audited: {error.message}", remedy=error.remedy))
        loaded, has_labels = LoadedData(DatasetDict(train=rows), task), False
    names = [name for name in SPLITS if name in loaded.splits]
    rows = concatenate_datasets([loaded.splits[name] for name in names])
    splits = np.repeat(names, [len(loaded.splits[name]) for name in names])
    total, labels = len(rows), loaded.task.labels(column_of(rows, "label"))
    if has_labels and (labels[splits == "train"] == labels[0]).all():
        emit(WarningMessage("all training rows have the same label: labels can't be audited"))
        has_labels = False
    if total > MAX_ROWS:
        kept = sample_rows(loaded.task.strata(labels), rows=MAX_ROWS, seed=0)
        rows, labels = rows_where(rows, kept), labels[kept]
        splits = splits[kept]
    task = loaded.task.with_loss(labels)
    is_chosen = loaded.drawn is not None
    return _Table(rows, task, splits, total, loaded.places, has_labels, is_chosen)


def _texts_in(path: Path, options: DataConfig) -> list[str]:
    pieces = read_texts(path.expanduser(), options, as_lines=False)
    return [text for piece in pieces for text in piece[:].texts if text and text.strip()]


def _without_labels(texts: Sequence[str]) -> tuple[Dataset, Task]:
    task = Regression()
    return make_dataset(texts, ["0"] * len(texts), task=task), task


def _read_features(config: Config, rows: Dataset, task: Task) -> LabeledFeatures:
    config = replace(config, training=replace(config.training, class_weights="none"))
    return read_frozen_features(prepare_head(config, rows, task, samples=False))


def _mix_with_folds(logits: Logits, table: _Table, path: Path) -> NDArray[np.float32]:
    """Average logits with those of a cross-validation, for the rows that it has as well."""
    task, rows, outputs = read_out_of_fold(path)
    mixed, probabilities = logits.copy(), outputs.probabilities
    if probabilities is None or [*task.class_names] != [*table.task.class_names]:
        return mixed
    texts = zip(table.splits.tolist(), table.numbers.tolist(), table.texts.to_pylist(), strict=True)
    places = {key: place for place, key in enumerate(texts)}
    keys = [(row.get("split", "train"), row["row"], full_text(row)) for row in rows]
    shared = np.array([key in places for key in keys])
    own = [places[key] for key in keys if key in places]
    clipped = np.clip(probabilities[shared], LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
    of_folds = np.log(clipped) - (np.log1p(-clipped) if task.problem_type == MULTI else 0)
    mixed[own] = (logits[own] + of_folds) / 2
    return mixed


def _describe_pairs(table: _Table, pairs: Pairs) -> list[Record]:
    """Return near duplicates as records, those with contradictory labels first."""
    labels = table.task.labels(column_of(table.rows, "label"))
    first, second = labels[pairs.first], labels[pairs.second]
    differ = (first != second).any(axis=tuple(range(1, first.ndim)))
    differ &= bool(table.task.class_names) and table.has_labels
    both = zip(*map(table.task.to_json, (first, second)), differ, strict=True)
    records = table.records(
        pairs.second,
        of_split=table.splits[pairs.first],
        of_row=table.numbers[pairs.first],
        of_text=table.texts.take(pyarrow.array(pairs.first)),
        similarity=pairs.similarity,
        labels=[labels if differs else () for *labels, differs in both],
    )
    return sorted(records, key=lambda record: (not record["labels"], -record["similarity"]))


def _list_suspects(table: _Table, features: LabeledFeatures, logits: Logits) -> list[Record]:
    """Return the labels that are most likely wrong."""
    task, labels, outputs = table.task, features.labels, table.task.read_logits(logits)
    order, losses = rank_suspects(task, logits, labels)
    listed = order[: int(np.ceil(LISTED_FRACTION * len(labels)))]
    predicted, probabilities = outputs.predicted, outputs.probabilities
    columns: dict[str, Any] = {
        "label": task.to_json(labels[listed]),
        "suggested": task.to_json(predicted[listed]),
        "loss": losses[listed],
    }
    if task.problem_type == SINGLE and probabilities is not None:
        columns["probability"] = probabilities[listed, labels[listed]].astype(float)
        columns["suggested_probability"] = probabilities[listed, predicted[listed]].astype(float)
    return table.records(listed, **columns)


def _fit_quickly(rows: LabeledFeatures, inverse_regularization: float) -> LinearHead:
    return fit_linear_head(
        rows, inverse_regularization=inverse_regularization, max_gradient=TRIED_GRADIENT
    )


def predict_out_of_fold(
    rows: LabeledFeatures, groups: NDArray[np.int64], *, folds: int
) -> NDArray[np.float32]:
    """Return the mean logits of heads fitted without the group of each row: [rows, outputs]."""
    if len(np.unique(groups)) == 1:  # All rows are near duplicates of each other.
        groups = np.arange(len(groups))
    folds = min(folds, len(np.unique(groups)))
    chosen, _ = choose_inverse_regularization(rows, seed=0)
    seeds = SEEDS if rows.features.size * rows.outputs <= MAX_WORK else 1
    total = np.zeros((len(rows.labels), rows.outputs), np.float32)
    for seed in range(seeds):
        fold = find_folds(groups, rows.groups, folds=folds, seed=seed)
        for number in range(folds):
            test = fold == number
            head = _fit_quickly(rows.select(np.flatnonzero(~test)), chosen)
            total[test] += head.logits(rows.features[test])
    return np.asarray(total / seeds, np.float32)


def rank_suspects(task: Task, logits: Logits, labels: Labels) -> tuple[NDArray[np.int64], Labels]:
    """Return rows, the highest loss first, and the loss of every row of the table.

    The only row of a class is left out, since no head learned that class from other rows.
    """
    losses = np.asarray(task.evaluation_losses(logits, labels), np.float64)
    order = np.argsort(-losses, kind="stable")
    rows, classes = task.class_rows(labels)
    if len(classes):
        order = order[~np.isin(order, rows[np.bincount(classes)[classes] == 1])]
    return order, losses


def measure_curve(task: Task, rows: LabeledFeatures, groups: NDArray[np.int64]) -> Curve | None:
    """Fit heads on nested subsets, and a power law to their errors; None for too few rows.

    The error of a row is 1 if it is misclassified, or the absolute error in regression.
    """
    total = len(rows.labels)
    work_per_row = rows.features.shape[1] * rows.outputs
    largest = min(int(0.8 * total), int(MAX_CURVE_WORK / work_per_row) + 1)
    is_too_small = largest < max(0.8 * MIN_ROWS, 4 * rows.outputs)
    if is_too_small or len(np.unique(groups)) < DRAWS:
        return None
    fold = find_folds(groups, rows.groups, folds=DRAWS, seed=0)
    sizes = np.geomspace(max(SMALLEST_FRACTION * largest, 10), largest, SIZES)
    sizes = np.unique(sizes.astype(int))
    errors = np.zeros((len(sizes), total))
    for draw in range(DRAWS):
        test = np.flatnonzero(fold == draw)
        order = np.random.default_rng(draw).permutation(np.flatnonzero(fold != draw))
        for number, size in enumerate(sizes):
            head = _fit_quickly(rows.select(order[:size]), DEFAULT_INVERSE_REGULARIZATION)
            predicted = task.read_logits(head.logits(rows.features[test])).predicted
            true, is_class = rows.labels[test], bool(task.class_names)
            wrong = predicted != true if is_class else np.abs(predicted - true)
            errors[number, test] = wrong.reshape(len(test), -1).max(axis=1)
    by_draw = np.array([errors[:, fold == draw].mean(axis=1) for draw in range(DRAWS)])
    slopes, means = [_slope(sizes, draw) for draw in by_draw], by_draw.mean(axis=0)
    slope = _slope(sizes, means)
    sign, base = (-1, 1.0) if task.class_names else (1, 0.0)

    def point(count: int, error: float, spread: float) -> dict[str, float]:
        low, high = sorted(base + sign * (error + spread * end) for end in (-1, 1))
        high = min(high, 1.0) if task.class_names else high
        return {"rows": count, "value": base + sign * error, "low": max(low, 0.0), "high": high}

    deviation = errors.std(axis=1) * Z_90 / total**0.5
    points = map(point, sizes.tolist(), means.tolist(), deviation.tolist())
    forecast = []
    for count in (times * total for times in TIMES_AS_MANY):
        shrink = (count / sizes[-1]) ** slope
        slope_error = float(np.std((count / sizes[-1]) ** np.array(slopes))) / DRAWS**0.5
        unsure = means[-1] * (Z_90 * slope_error + LAW_ERROR * (1 - shrink))
        forecast.append(point(count, means[-1] * shrink, float(np.hypot(deviation[-1], unsure))))
    metric = {"single": "accuracy", "multi": "exact-match accuracy"}.get(task.name, "mae")
    return {"metric": metric, "points": [*points], "forecast": forecast}


def _slope(sizes: NDArray[Any], errors: NDArray[np.float64]) -> float:
    """Return the exponent of the power law through errors, at most 0. Larger sizes count more."""
    line = np.polyfit(np.log(sizes), np.log(np.maximum(errors, 1e-6)), 1, w=sizes**0.25)
    return min(float(line[0]), 0.0)


def choose_to_label(
    features: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    *,
    batch: int,
    batches: int,
) -> NDArray[np.int64]:
    """Return the texts to label, the most useful first: at most ``batch * batches`` row numbers.

    Probabilities are [texts, classes]. Without them, texts are chosen only for variety. Each text
    in a batch has the highest product of squared uncertainty, density and distance to the texts
    before it. On TREC, 250 texts in addition to 60 reach the accuracy of 425 random texts.
    """
    generator = np.random.default_rng(0)
    pool = np.sort(generator.permutation(len(features))[:MAX_TEXTS])
    unit = normalize_rows(features[pool])
    sample = unit[generator.permutation(len(unit))[:SAMPLED_TEXTS]]
    value = np.sqrt(np.mean(np.maximum(unit @ sample.T, 0) ** 3, axis=1)) + 1e-6
    if probabilities is not None and probabilities.shape[1] > 1:
        two_best = np.sort(probabilities[pool], axis=1)[:, -2:]
        value *= (1 - (two_best[:, 1] - two_best[:, 0]) + 1e-6) ** 2
    chosen: list[int] = []
    for place in range(min(batch * batches, len(pool))):
        if place % batch == 0:
            distance = np.ones(len(pool), np.float32)
        scores = value * distance
        scores[chosen] = -1
        best = int(scores.argmax())
        chosen.append(best)
        distance = np.minimum(distance, 1 - unit @ unit[best])
    return pool[chosen]
