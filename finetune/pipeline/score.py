"""A trained model's answers: figures on a split, and classes of new texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import nn

from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.devices.base import Device
from finetune.devices.names import DeviceName
from finetune.devices.select import select_device
from finetune.errors import NotARun
from finetune.evaluation.evaluate import evaluate_logits
from finetune.evaluation.predict import predict_logits, probabilities
from finetune.events import Stage, Tell
from finetune.model.load import Classifier, load_classifier
from finetune.pipeline.examples import encode_for, encode_split, inputs_maker
from finetune.pipeline.prepare import Prepared, load_splits
from finetune.runs.folder import RunFolder, open_run_folder, read_json
from finetune.training.micro_batches import Examples

# Texts are encoded and kept in memory in pieces of this size, so that a file of any length can be
# classified; within one, texts of like length share a batch.
TEXTS_A_PIECE = 10_000


def score_examples(
    model: nn.Module, examples: Examples, prepared: Prepared
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return a model's figures on the rows of a split, and its logits."""
    logits = predict_logits(
        model,
        examples.inputs_of,
        examples.lengths,
        batch_size=prepared.config.training.eval_batch_size,
        device=prepared.device,
    )
    figures = evaluate_logits(logits, examples.labels, class_names=prepared.class_names)
    return figures, logits


def evaluate(run: Path, *, split: str, device: DeviceName, tell: Tell) -> dict[str, Any]:
    """Try a run's model on a split of the run's data.

    Args:
        run: The run folder.
        split: ``test``, ``validation`` or ``train``.
        device: Name of the device, or ``auto``.
        tell: Is told what goes on.

    Raises:
        NotARun: If the folder holds no run with a model, or the run has no such split.
    """
    folder = open_run_folder(run)
    config = _config_of(folder, device=device)
    table = load_splits(config, tell=tell)
    if split not in table:
        raise NotARun(
            f"the run in {run} has no {split} split", remedy=f"it has: {', '.join(table)}"
        )
    classifier = _load_model(folder, table[split].features["label"].names, tell=tell)
    prepared = Prepared(config, select_device(device, tell=tell), table, classifier)
    tell(Stage(f"evaluating on the {split} split, {prepared.device.description}"))
    examples = encode_split(prepared, split, class_weights="none", tell=tell)
    model = _placed(classifier, prepared.device)
    figures, _ = score_examples(model, examples, prepared)
    return {"split": split, "samples": len(examples.labels), **figures}


def load_predictor(
    run: Path, *, device: DeviceName, tell: Tell
) -> Callable[[Sequence[str]], list[dict[str, Any]]]:
    """Load a run's model once, to classify texts with it.

    Args:
        run: The run folder.
        device: Name of the device, or ``auto``.
        tell: Is told what goes on.

    Returns:
        A function that takes texts and returns, in their order, ``text``, ``label`` and
        ``probability``, in 0..1, of each.

    Raises:
        NotARun: If the folder holds no run with a model.
    """
    folder = open_run_folder(run)
    config = _config_of(folder, device=device)
    class_names = _class_names_of(folder)
    classifier = _load_model(folder, class_names, tell=tell)
    chosen = select_device(device, tell=tell)
    model = _placed(classifier, chosen)

    def predict_piece(texts: Sequence[str]) -> list[dict[str, Any]]:
        encoded = encode_for(classifier, texts, max_length=config.model.max_length)
        logits = predict_logits(
            model,
            inputs_maker(encoded, classifier),
            encoded.lengths,
            batch_size=config.training.eval_batch_size,
            device=chosen,
        )
        return answers(texts, logits, class_names)

    def predict(texts: Sequence[str]) -> list[dict[str, Any]]:
        pieces = (
            predict_piece(texts[start : start + TEXTS_A_PIECE])
            for start in range(0, len(texts), TEXTS_A_PIECE)
        )
        return [answer for piece in pieces for answer in piece]

    return predict


def answers(
    texts: Sequence[str], logits: NDArray[np.float32], class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return each text with its likeliest class and that class's probability."""
    shares = probabilities(logits)
    likeliest = shares.argmax(axis=-1)
    return [
        {"text": text, "label": class_names[number], "probability": float(share[number])}
        for text, number, share in zip(texts, likeliest, shares, strict=True)
    ]


def prediction_rows(rows: Dataset, logits: NDArray[np.float32]) -> list[dict[str, Any]]:
    """Return each row's text, true class, predicted class and its probability."""
    feature = rows.features["label"]
    predicted = answers(rows["text"], logits, feature.names)
    return [
        {
            "text": answer["text"],
            "label": feature.int2str(label),
            "predicted": answer["label"],
            "probability": answer["probability"],
        }
        for answer, label in zip(predicted, rows["label"], strict=True)
    ]


def _config_of(folder: RunFolder, *, device: DeviceName) -> Config:
    saved = load_config(
        file=str(folder.config_file), environment={}, flags={}, assignments=()
    ).config
    return replace(saved, training=replace(saved.training, device=device))


def _class_names_of(folder: RunFolder) -> list[str]:
    names_by_number = read_json(folder.model_folder / "config.json")["id2label"]
    return [names_by_number[str(number)] for number in range(len(names_by_number))]


def _placed(classifier: Classifier, device: Device) -> nn.Module:
    model: nn.Module = classifier.model
    return model.to(device.torch_device)


def _load_model(folder: RunFolder, class_names: Sequence[str], *, tell: Tell) -> Classifier:
    return load_classifier(
        str(folder.model_folder), revision=None, class_names=class_names, tell=tell
    )
