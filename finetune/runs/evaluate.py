"""The metrics of a finished run on a split of its data, or on other data."""

from typing import Any

from datasets import Dataset

from finetune.data.load import load_rows, load_splits
from finetune.data.source import OtherData
from finetune.distributed.processes import join_processes
from finetune.errors import DataError, NotARun
from finetune.events import Emit, Info
from finetune.runs.encoding import encode_rows
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import Manifest
from finetune.runs.trained import TrainedModel
from finetune.tasks.metrics import load_evaluate_metric
from finetune.tasks.scores import Scores, warn_unless_better


def evaluate_split(
    folder: RunFolder, split: str, *, device: str, metric: str | None = None, emit: Emit
) -> Scores:
    """Evaluate a run's model on a split of the data that it was made from; see ``load_split``."""
    rows = load_split(folder, split, emit=emit)
    return _score(folder, rows, split=split, device=device, metric=metric, emit=emit)


def load_split(folder: RunFolder, split: str, *, emit: Emit) -> Dataset:
    """Load a split of the data that a run was made from.

    Raises:
        NotARun: If the run has no such split.
        DataDiffers: If the data is no longer what the run was made from.
    """
    config = folder.read_config()
    data = load_splits(config.data, emit=emit)
    splits = data.splits
    if split not in splits:
        raise NotARun(
            f"the run in {folder.path} has no {split} split", remedy=f"it has: {', '.join(splits)}"
        )
    Manifest.read(folder).check(
        Manifest.of_data(data),
        remedy="restore the data, or score other data with finetune evaluate RUN --data FILE",
    )
    return splits[split]


def evaluate_data(
    folder: RunFolder,
    source: str,
    columns: dict[str, Any],
    *,
    device: str,
    metric: str | None = None,
    emit: Emit,
) -> Scores:
    """Evaluate a run's model on all rows of other data, read as the run's own but for columns.

    Raises:
        DataError: If the data can't be read, or has classes that the model lacks.
    """
    manifest = Manifest.read(folder)
    options = {**vars(folder.read_config().data), **columns, "data": source}
    rows = load_rows(
        OtherData(**options, earlier_columns=manifest.columns),
        task=folder.read_task(),
        emit=emit,
    )
    if ("text_pair" in rows.column_names) != (reads_pairs := manifest.reads_pairs):
        kinds = ("single texts", "pairs of texts")
        raise DataError(
            f"{source} has {kinds[not reads_pairs]}, and the model reads {kinds[reads_pairs]}",
            remedy="name the columns of texts as in the data that the run was made from",
        )
    return _score(folder, rows, split=source, device=device, metric=metric, emit=emit)


def _score(
    folder: RunFolder, rows: Dataset, *, split: str, device: str, metric: str | None, emit: Emit
) -> Scores:
    """Score rows; ``metric`` names one of the library ``evaluate``, too."""
    others = [load_evaluate_metric(metric)] if metric else []
    model = TrainedModel.load(folder, device=device, emit=emit, processes=join_processes())
    place = f"{model.device.name} ({model.device.description})"
    emit(Info(f"evaluating {len(rows):,} rows of {split} on {place}"))
    examples = encode_rows(
        rows, split, model.text_model, config=model.config, emit=emit,
        processes=model.predictor.processes,
    )  # fmt: skip
    logits = model.logits(examples)
    scores = model.text_model.task.score(logits, examples.labels, others=others)
    warn_unless_better(scores, emit=emit)
    return scores
