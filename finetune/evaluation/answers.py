"""Logits become the answers that users read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
        probabilities: Of all classes by name, where they were asked for.
        columns: The other columns of the text's row by name.
        text_pair: The second text of a pair.
    """

    text: str
    label: str
    probability: float
    probabilities: Mapping[str, float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    text_pair: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune predict --json`` prints.

        A column whose name the answer needs, such as the true ``label``, becomes ``input_label``.
        """
        answer: dict[str, Any] = {
            "text": self.text,
            **({} if self.text_pair is None else {"text_pair": self.text_pair}),
            "label": self.label,
            "probability": self.probability,
        }
        if self.probabilities is not None:
            answer["probabilities"] = self.probabilities
        return answer | {
            f"input_{name}" if name in answer else name: value
            for name, value in self.columns.items()
        }


def answer_texts(
    texts: Sequence[str],
    logits: NDArray[np.float32],
    *,
    class_names: Sequence[str],
    all_scores: bool = False,
) -> list[Answer]:
    """Return each text's most probable class.

    Args:
        texts: The texts.
        logits: float32 of shape [texts, classes].
        class_names: The classes in the order of their numbers.
        all_scores: Also give the probability of each class.
    """
    probabilities = torch.from_numpy(logits).softmax(dim=-1)
    best, labels = probabilities.max(dim=-1)
    names = (class_names[label] for label in labels.tolist())
    answers = [Answer(*one) for one in zip(texts, names, best.tolist(), strict=True)]
    if not all_scores:
        return answers
    return [
        replace(answer, probabilities=dict(zip(class_names, row, strict=True)))
        for answer, row in zip(answers, probabilities.tolist(), strict=True)
    ]
