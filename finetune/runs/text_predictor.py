"""The interface of what predicts texts; each runtime, such as PyTorch, implements it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from finetune.config.schema import Config
from finetune.evaluation.explain import explain
from finetune.tasks.base import Logits, Prediction, Task
from finetune.tokenization.encode import EncodedTexts

if TYPE_CHECKING:
    from finetune.tokenization.encode import Texts


@dataclass(frozen=True)
class TextPredictor(ABC):
    """The model of a run in one runtime, which subclasses implement as ``encoded_logits``."""

    config: Config
    task: Task
    reads_pairs: bool

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it computes, such as ``cpu (Apple M2)``."""

    @abstractmethod
    def encode(self, texts: "Texts", pairs: "Texts | None" = None) -> EncodedTexts:
        """Return the token IDs of texts or pairs."""

    @abstractmethod
    def encoded_logits(self, encoded: EncodedTexts, *, by_all: bool = False) -> Logits:
        """Return the logits of encoded texts: float32 of shape [texts, outputs].

        ``by_all``: all ranks call this together, and may share the work.
        """

    def text_logits(self, texts: "Texts", pairs: "Texts | None" = None) -> Logits:
        """Return the logits of texts or pairs: float32 of shape [texts, outputs]."""
        return self.encoded_logits(self.encode(texts, pairs))

    def predict(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        all_scores: bool = False,
        explains: bool = False,
    ) -> Sequence[Prediction]:
        """Return the prediction for each of at least one text or pair.

        With ``explains``, each prediction has the words that decided it.
        """
        task, logits = self.task, self.text_logits(texts, pairs)
        predictions = task.predict(texts, logits, all_scores=all_scores)
        if not explains:
            return predictions
        explanations = explain(task, self.text_logits, logits, texts, pairs)
        both = zip(predictions, explanations, strict=True)
        return [replace(prediction, explanation=words) for prediction, words in both]

    def no_prediction(self, *, all_scores: bool = False) -> Prediction:
        """Return the prediction for a missing text, in which each value is None."""
        logits = np.zeros((1, len(self.task.output_names)), np.float32)
        [prediction] = self.task.predict([""], logits, all_scores=all_scores)
        scores = prediction.probabilities
        values, probabilities = dict.fromkeys(prediction.values), scores and dict.fromkeys(scores)
        return replace(prediction, values=values, probabilities=probabilities)
