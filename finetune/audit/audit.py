"""Audits a table in one pass over its texts, with linear heads on frozen-encoder features."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune.audit.duplicates import Pairs, find_near_duplicates
from finetune.config.schema import Config, TrainingConfig
from finetune.data.corrections import KEEP, decision_key, read_decisions
from finetune.data.dataset import (
    SPLITS,
    KnownTokens,
    LoadedData,
    make_dataset,
    sample_rows,
    texts_of,
)
from finetune.data.load import load_data, load_splits
from finetune.data.stream import read_texts
from finetune.errors import DataError
from finetune.evaluation.explain import Targets, explain
from finetune.events import WarningMessage, emit, stage
from finetune.runs.linear_head import prepare_head, read_frozen_features, read_text_features
from finetune.runs.prepare import RunInputs
from finetune.runs.several import read_out_of_fold
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.explanation import MIN_MARKED, WordChange
from finetune.tasks.metrics import MULTI, SINGLE
from finetune.tasks.regression import Regression
from finetune.tasks.tables import full_text
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    TRIED_GRADIENT,
    LabeledFeatures,
    choose_inverse_regularization,
    cross_validate,
    fit_linear_head,
)

# Larger tables are sampled.
MAX_ROWS = 100_000
# The fraction of rows to list as suspects.
LISTED_FRACTION = 0.1
SEEDS = 3
LOWEST_PROBABILITY = 1e-6
# Above this product of features and outputs, heads would take a minute per seed.
MAX_WORK = 1.2e8
# This many suspects are explained, as long as their texts with left-out words have at most 10% as
# many tokens as the table. MiniLM reads 10,000 tokens in about two seconds on two CPU cores.
MAX_EXPLAINED, EXPLAINED_FRACTION, MIN_EXPLAINED_TOKENS = 200, 0.1, 10_000
# Texts rarely have more variants, because only some words of long texts are left out.
MAX_VARIANTS = 100

Record = Mapping[str, Any]
"""A row of the table: its split, its number there, its id, its place, its text, and more."""


@dataclass(frozen=True)
class Audit:
    """The result of an audit. Without labels, it lists only duplicates.

    ``decided`` are rows in the corrections, with their decision, which are not suspects again.
    ``splits`` counts the rows of each split of the table, or of the audited run.
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
    folder: str | None = None


@dataclass(frozen=True)
class _Table:
    """All rows, or a sample of ``total``. Splits have the shape [rows]."""

    rows: pyarrow.Table
    task: Task
    splits: NDArray[np.str_]
    total: int
    places: Mapping[str, Callable[[int], str]]
    has_labels: bool = True
    tokens: KnownTokens | None = None

    @cached_property
    def texts(self) -> pyarrow.Array:
        return texts_of(self.rows).joined.combine_chunks()

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Row numbers in the table: [rows]."""
        return np.asarray(self.rows["row"].to_numpy())

    def records(self, rows: NDArray[np.int64], **columns: Any) -> list[Record]:
        """Return rows as records, with additional columns."""
        where: dict[str, Any] = {"split": self.splits[rows], "row": self.numbers[rows]}
        if "id" in self.rows.column_names:
            where["id"] = self.rows["id"].take(pyarrow.array(rows))
        if self.places:
            # Splits held out by a run come from the table of the training rows.
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
    read: LoadedData | None = None,
) -> Audit:
    """Audit all rows of the data with linear heads on the frozen encoder.

    If the options are from a run, the rows are in its splits. ``out_of_fold`` is the folder of a
    cross-validation whose predictions are also used, ``read`` the data if it was read to
    guess options.
    """
    with stage("data"):
        table = _load_table(config, is_run=is_run, read=read)
    with stage("features"):
        inputs = _prepare(config, table)
        features = read_frozen_features(inputs)
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
        with stage("heads"):
            logits = predict_out_of_fold(features, pairs.groups(len(table.rows)), folds=folds)
            if out_of_fold is not None and len(table.rows) == table.total:
                logits = _mix_with_folds(logits, table, out_of_fold)
        suspects = _list_suspects(table, features, logits)
        if corrections := config.data.corrections:
            decided = read_decisions(Path(corrections).expanduser(), table.task.class_names)
            known = {
                decision_key(
                    row["text"], row["label"] if row["decision"] == KEEP else row["decision"]
                )
                for row in decided
            }
            suspects = {
                number: row
                for number, row in suspects.items()
                if decision_key(row["text"], row["label"]) not in known
            }
            result = replace(result, decided=decided)
        if table.task.class_names:
            with stage("words"):
                words = _explain_suggestions(table, inputs, features, logits, [*suspects])
            suspects = {n: {**row, "words": words.get(n, ())} for n, row in suspects.items()}
        result = replace(result, suspects=[*suspects.values()])
    return result


def _load_table(config: Config, *, is_run: bool, read: LoadedData | None) -> _Table:
    """Load all rows or a sample. Unlabeled tables get zeros as labels."""
    path = Path(config.data.data).expanduser()
    try:
        loaded, has_labels = (load_splits if is_run else load_data)(config.data, read=read), True
    except DataError as error:
        if config.data.label_column is not None or not path.is_file():
            raise
        pieces, no_task = read_texts(path, config.data, as_lines=False), Regression()
        texts = [text for piece in pieces for text in piece[:].texts if text and text.strip()]
        rows = make_dataset(texts, ["0"] * len(texts), task=no_task)
        emit(WarningMessage(f"labels are not audited: {error.message}", remedy=error.remedy))
        loaded, has_labels = LoadedData({"train": rows}, no_task), False
    names = [name for name in SPLITS if name in loaded.splits]
    rows = pyarrow.concat_tables(loaded.splits[name] for name in names)
    splits = np.repeat(names, [len(loaded.splits[name]) for name in names])
    total, labels = len(rows), loaded.task.labels(rows["label"])
    if has_labels and (labels[splits == "train"] == labels[0]).all():
        emit(WarningMessage("all training rows have the same label: labels can't be audited"))
        has_labels = False
    if total > MAX_ROWS:
        kept = sample_rows(loaded.task.strata(labels), rows=MAX_ROWS, seed=0)
        rows, labels = rows.filter(kept), labels[kept]
        splits = splits[kept]
    task = loaded.task.with_loss(labels, TrainingConfig())
    return _Table(rows, task, splits, total, loaded.places, has_labels, loaded.tokens)


def _prepare(config: Config, table: _Table) -> RunInputs:
    config = replace(config, training=replace(config.training, class_weights="none"))
    return prepare_head(config, table.rows, table.task, samples=False, known=table.tokens)


def _mix_with_folds(logits: Logits, table: _Table, path: Path) -> NDArray[np.float32]:
    """Average logits with the logits of a cross-validation, for common rows."""
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
    """Return near duplicates as records, pairs with contradictory labels first."""
    labels = table.task.labels(table.rows["label"])
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


def _list_suspects(table: _Table, features: LabeledFeatures, logits: Logits) -> dict[int, Record]:
    """Return the rows whose labels are most likely wrong, by row position."""
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
    return dict(zip(listed.tolist(), table.records(listed, **columns), strict=True))


def _explain_suggestions(
    table: _Table,
    inputs: RunInputs,
    features: LabeledFeatures,
    logits: Logits,
    suspects: Sequence[int],
) -> dict[int, list[WordChange]]:
    """Return the words that support the suggestions for the first suspects.

    A single head, fitted without suspects, explains all of them. Otherwise, each needs three heads.
    """
    task, predicted = table.task, table.task.read_logits(logits).predicted
    targets: dict[int, Targets] = {}
    for row in suspects:
        label = features.labels[row]
        if task.problem_type == SINGLE and predicted[row] != label:
            targets[row] = {int(predicted[row]): None}
        elif task.problem_type == MULTI and (added := np.flatnonzero(predicted[row] > label)).size:
            targets[row] = {number: task.class_names[number] for number in added.tolist()}
    lengths = inputs.examples["train"].lengths
    left = max(MIN_EXPLAINED_TOKENS, EXPLAINED_FRACTION * float(lengths.sum()))
    rows = list[int]()
    for row in [*targets][:MAX_EXPLAINED]:
        # A long text may exceed the limit while shorter ones after it don't.
        if (tokens := lengths[row] * min(lengths[row], MAX_VARIANTS)) <= left:
            rows.append(row)
            left -= tokens
    others = np.setdiff1d(np.arange(len(lengths)), suspects)
    if not rows or not len(others):
        return {}
    head = fit_linear_head(
        features.select(others),
        inverse_regularization=DEFAULT_INVERSE_REGULARIZATION,
        max_gradient=TRIED_GRADIENT,
    )

    def predict(texts: Sequence[str], pairs: Sequence[str] | None) -> Logits:
        columns = [texts] if pairs is None else [texts, pairs]
        return head.logits(read_text_features(inputs, columns))

    columns = [c.take(pyarrow.array(rows)).to_pylist() for c in texts_of(table.rows).columns]
    explained = explain(
        task,
        predict,
        head.logits(features.features[rows]),
        *columns,
        targets=[targets[row] for row in rows],
    )
    falls = ([each for each in words if each.change <= -MIN_MARKED] for words in explained)
    return dict(zip(rows, falls, strict=True))


def predict_out_of_fold(
    rows: LabeledFeatures, groups: NDArray[np.int64], *, folds: int
) -> NDArray[np.float32]:
    """Compute the mean logits of heads fitted without the group of each row: [rows, outputs]."""
    if len(np.unique(groups)) == 1:  # All rows are near duplicates of each other.
        groups = np.arange(len(groups))
    chosen, _ = choose_inverse_regularization(rows, seed=0)
    seeds = range(SEEDS if rows.features.size * rows.outputs <= MAX_WORK else 1)
    logits = [
        cross_validate(rows, [chosen], seed=seed, folds=folds, groups=groups)[chosen]
        for seed in seeds
    ]
    return np.asarray(np.mean(logits, axis=0), np.float32)


def rank_suspects(task: Task, logits: Logits, labels: Labels) -> tuple[NDArray[np.int64], Labels]:
    """Return rows by descending loss, and the loss of every row of the table.

    Leave out the only row of a class, because no head learned the class from other rows.
    """
    losses = np.asarray(task.evaluation_losses(logits, labels), np.float64)
    order = np.argsort(-losses, kind="stable")
    rows, classes = task.class_rows(labels)
    if len(classes):
        order = order[~np.isin(order, rows[np.bincount(classes)[classes] == 1])]
    return order, losses
