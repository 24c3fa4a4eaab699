"""The classes of new texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.devices.names import DeviceName
from finetune.devices.select import select_device
from finetune.evaluation.predict import predict_logits, probabilities
from finetune.events import Emit
from finetune.pipeline.score import evaluation_batch_size
from finetune.pipeline.trained import load_saved_config, load_trained, place
from finetune.runs.folder import open_run_folder

# Texts are encoded and kept in memory in pieces of this size, so that a file of any length can be
# classified; within one, texts of like length share a batch.
TEXTS_A_PIECE = 10_000


def load_predictor(
    run: Path, *, device: DeviceName, emit: Emit
) -> Callable[[Sequence[str]], list[dict[str, Any]]]:
    """Load a run's model once, to classify texts with it.

    Args:
        run: The run folder.
        device: Name of the device, or ``auto``.
        emit: Receives progress events.

    Returns:
        A function that takes texts and returns, in their order, ``text``, ``label`` and
        ``probability``, in 0..1, of each.

    Raises:
        NotARun: If the folder holds no run with a model.
        BatchDoesNotFit: If memory does not suffice for one text; raised by the function too.
    """
    folder = open_run_folder(run)
    config = load_saved_config(folder)
    classifier = load_trained(folder, emit=emit)
    chosen = select_device(device, emit=emit)
    model = place(classifier, chosen)
    batch_size = evaluation_batch_size(config, chosen, emit=emit)

    def predict_piece(texts: Sequence[str]) -> list[dict[str, Any]]:
        encoded = classifier.encode(texts, max_length=config.model.max_length)
        longest_tokens = int(encoded.lengths.max())
        logits = batch_size.fit(
            lambda rows: predict_logits(
                model,
                classifier.inputs(encoded),
                padded_lengths=classifier.padded_lengths(longest_tokens, chosen.shapes),
                batch_size=rows,
                device=chosen,
            )
        )
        return answers(texts, logits, classifier.class_names)

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
