"""Logits become the answers that users read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Answer:
    """The most probable class of a text.

    Args:
        text: The text.
        label: Name of the class.
        probability: Of that class, in 0..1.
    """

    text: str
    label: str
    probability: float


def answer_texts(
    texts: Sequence[str], logits: NDArray[np.float32], *, class_names: Sequence[str]
) -> list[Answer]:
    """Return each text's most probable class.

    Args:
        texts: The texts.
        logits: float32 of shape [texts, classes].
        class_names: The classes in the order of their numbers.
    """
    best, labels = torch.from_numpy(logits).softmax(dim=-1).max(dim=-1)
    names = (class_names[label] for label in labels.tolist())
    return [Answer(*one) for one in zip(texts, names, best.tolist(), strict=True)]
