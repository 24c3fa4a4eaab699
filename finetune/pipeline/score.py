"""A model's figures on a split."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from finetune.config.schema import Config
from finetune.devices.base import Device
from finetune.devices.names import DeviceName
from finetune.devices.select import select_device
from finetune.errors import LossNotFinite, NotARun
from finetune.evaluation.evaluate import evaluate_logits
from finetune.evaluation.predict import predict_logits
from finetune.events import Emit, Stage
from finetune.pipeline.examples import encode_split
from finetune.pipeline.prepare import Prepared, load_splits
from finetune.pipeline.trained import load_saved_config, load_trained, place
from finetune.runs.folder import open_run_folder
from finetune.tokenization.examples import Examples
from finetune.training.out_of_memory import BatchSize

SCORES_SCHEMA_VERSION = 1


def score_examples(
    model: nn.Module,
    examples: Examples,
    prepared: Prepared,
    *,
    padded_lengths: Sequence[int],
    batch_size: BatchSize,
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return a model's figures on the rows of a split, and its logits.

    Args:
        model: On the device.
        examples: The split.
        prepared: The run.
        padded_lengths: Padded lengths that a batch may have, ascending.
        batch_size: Rows in one forward; fewer after memory ran out.

    Raises:
        LossNotFinite: If a logit is NaN or infinite.
        BatchDoesNotFit: If not even one row fits the device's memory.
    """
    # The longest rows come first, so that little was done for nothing where memory runs out.
    logits = batch_size.fit(
        lambda rows: predict_logits(
            model,
            examples,
            padded_lengths=padded_lengths,
            batch_size=rows,
            device=prepared.device,
        )
    )
    if not np.isfinite(logits).all():
        raise LossNotFinite(
            "the model answers with numbers that are NaN or infinite",
            remedy="train it with a lower --learning-rate, or with --precision fp32",
        )
    metrics = evaluate_logits(logits, examples.labels, class_names=prepared.classifier.class_names)
    return metrics, logits


def evaluation_batch_size(config: Config, device: Device, *, emit: Emit) -> BatchSize:
    """Return the rows in one forward without a graph, as a configuration sets them at first."""
    rows = config.training.eval_batch_size
    return BatchSize(rows, "batch size of evaluation", device, emit)


def evaluate(run: Path, *, split: str, device: DeviceName, emit: Emit) -> dict[str, Any]:
    """Try a run's model on a split of the run's data.

    Args:
        run: The run folder.
        split: ``test``, ``validation`` or ``train``.
        device: Name of the device, or ``auto``.
        emit: Receives progress events.

    Raises:
        NotARun: If the folder holds no run with a model, or the run has no such split.
    """
    folder = open_run_folder(run)
    config = load_saved_config(folder)
    table = load_splits(config, emit=emit)
    if split not in table:
        raise NotARun(
            f"the run in {run} has no {split} split", remedy=f"it has: {', '.join(table)}"
        )
    classifier = load_trained(folder, emit=emit)
    prepared = Prepared(config, select_device(device, emit=emit), table, classifier)
    emit(Stage(f"evaluating on the {split} split, {prepared.device.description}"))
    examples = encode_split(prepared, split, emit=emit)
    model = place(classifier, prepared.device)
    padded_lengths = classifier.padded_lengths(int(examples.lengths.max()), prepared.device.shapes)
    batch_size = evaluation_batch_size(config, prepared.device, emit=emit)
    metrics, _ = score_examples(
        model, examples, prepared, padded_lengths=padded_lengths, batch_size=batch_size
    )
    return {
        "schema_version": SCORES_SCHEMA_VERSION,
        "split": split,
        "samples": len(examples.labels),
        **metrics,
    }
