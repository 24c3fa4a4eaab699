"""Evaluates the model of a run on a split of its data or on other data."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune import distributed
from finetune.data.columns import OtherData
from finetune.data.dataset import number_splits, texts_of
from finetune.data.load import load_rows, load_splits
from finetune.devices import Runtime
from finetune.errors import DataError, FinetuneError, NotARunError
from finetune.events import Info, WarningMessage, emit, muted
from finetune.runs.folder import TABLE, BundleFolder, RunFolder
from finetune.runs.manifest import Manifest, reads_pairs
from finetune.runs.runtime import load_predictor
from finetune.tasks.metrics import load_evaluate_metric
from finetune.tasks.scores import Scores


def load_split(folder: RunFolder, split: str) -> pyarrow.Table:
    """Load a split of a run's data; raise ``DataError`` if the data changed."""
    options = folder.read_config().data
    if isinstance(folder, BundleFolder):
        raise NotARunError(
            f"{folder.path} is a bundle, which does not have the data of its run",
            remedy="evaluate the run, or add a FILE with labels",
        )
    if options.private_data and TABLE.fullmatch(Path(options.data).name):
        raise NotARunError(
            f"the data of the run in {folder.path} is private, so its copy was deleted",
            remedy="pass the table as data=",
        )
    data = load_splits(options)
    if split not in data.splits:
        raise NotARunError(
            f"the run in {folder.path} has no {split} split",
            remedy=f"it has: {', '.join(data.splits)}",
        )
    Manifest.read(folder).check(
        Manifest.of_data(data),
        remedy="restore the data, or score other data with finetune evaluate RUN FILE",
    )
    return data.splits[split]


def other_data(folder: RunFolder, source: str, options: dict[str, Any]) -> OtherData:
    """Return options for other data: the options of the run, with the given changes."""
    data_options, manifest = vars(folder.read_config().data), Manifest.read(folder)
    parts = ("table", *manifest.columns)
    data_options = {**data_options, **dict.fromkeys(parts), "data": source, **options}
    return OtherData(**data_options, earlier_columns=manifest.columns)


def load_other_data(folder: RunFolder, source: str, columns: dict[str, Any]) -> pyarrow.Table:
    """Load all rows of other data, with the options of the run and the given columns."""
    other = other_data(folder, source, columns)
    rows = load_rows(other, task=folder.read_task())
    if ("text_pair" in rows.column_names) != (is_of_pairs := reads_pairs(folder)):
        kinds = ("single texts", "sentence pairs")
        raise DataError(
            f"{source} has {kinds[not is_of_pairs]}, but the model reads {kinds[is_of_pairs]}",
            remedy="set --text-column and --text-pair-column, or use the columns of the run's data",
        )
    return rows


def _find_trained(folder: RunFolder, rows: pyarrow.Table) -> NDArray[np.bool_]:
    """Return which rows have a text that the run was trained on; none if its data changed."""
    try:
        with muted():
            train = load_split(folder, "train")
    except FinetuneError as error:
        emit(Info(f"it is unknown how many rows were in training: {error.message}"))
        return np.zeros(len(rows), bool)
    numbers = number_splits({"rows": texts_of(rows).columns, "train": texts_of(train).columns})
    return np.isin(numbers["rows"], numbers["train"])


@distributed.joined()
def evaluate_rows(
    folder: RunFolder,
    rows: pyarrow.Table,
    name: str,
    *,
    device: str,
    runtime: Runtime,
    metric: str | None,
) -> tuple[Scores, int, Scores | None]:
    """Score the model of a run on rows, and on the rows that were not in training."""
    others = [load_evaluate_metric(metric)] if metric else []
    model = load_predictor(folder, device=device, runtime=runtime)
    emit(Info(f"evaluating {len(rows):,} rows of {name} on {model.place}"))
    encoded, labels = model.encode(*texts_of(rows)), model.task.labels(rows["label"])
    if encoded.truncated_texts:
        longest = f"longer than {encoded.lengths.max()} tokens"
        message = f"{encoded.truncated_texts:,} of {len(rows):,} texts are {longest} and truncated"
        remedy = "train with a higher --max-length or --long-texts windows, if their ends matter"
        emit(WarningMessage(message, remedy=remedy))
    logits = model.encoded_logits(encoded, by_all=True)
    score = partial(model.task.score, others=others)
    scores, unseen, trained_rows = score(logits, labels), None, 0
    if name not in ("train", "validation", "test"):
        is_trained = _find_trained(folder, rows)
        if 0 < (trained_rows := int(is_trained.sum())) < len(rows):
            unseen = score(logits[~is_trained], labels[~is_trained])
    return scores, trained_rows, unseen
