"""Class prototypes: a linear head without labels, from class names and unlabeled texts.

Each class starts with the features of its name. The mean of the names differs from the mean of the
texts, so names and texts are centered separately. Then, repeatedly, the texts are softly assigned
to the most similar prototypes, which move towards their texts. No parameter of the encoder changes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from finetune.training.linear_head import LinearHead, normalize

# With a temperature of 0.1, BANKING77, HWU64 and CLINC150 lose 0.4 to 2.2 points. Classes that are
# forced to have the same size lose 1 to 8, most where a class is rare
# (docs/measurements.md#no-labels).
TEMPERATURE = 0.05
# Weight of the name in its prototype; the rest is the weight of the texts. It is higher in the last
# round, because the name still says something after the texts have gathered. With few texts, the
# name weighs as much as 10 of them: otherwise, 100 texts make names worse
# (docs/measurements.md#no-labels).
FROM_NAME, LAST_FROM_NAME, TEXTS_PER_NAME, ROUNDS = 0.3, 0.5, 10, 20
# The mean confidence in the texts is this multiple of the fraction of them whose class is that of
# the most similar name. In 42 cases of 18 tables, the mean calibration error (ECE) is 8.2%
# (docs/measurements.md#no-labels).
CONFIDENCE, TEMPERATURES = 0.9, (0.08, 0.5)
# 74% of meaningless names are below, and 2 of 385 names of classes with a good F1.
MIN_SIMILARITY = 0.2


@dataclass(frozen=True)
class Prototypes:
    """Class unit vectors, [classes, hidden], around the ``center`` of the texts, [hidden]."""

    vectors: NDArray[np.float32]
    center: NDArray[np.float32]
    scale: float  # mean norm of the centered texts
    temperature: float  # of the probabilities, chosen without labels
    names_fit: NDArray[np.bool_]  # whether each name is similar to the mean of its texts

    @classmethod
    def of(
        cls,
        names: NDArray[np.float32],
        texts: NDArray[np.float32],
        labels: NDArray[np.int64] | None = None,
    ) -> "Prototypes":
        """Fit prototypes to features of names, [classes, hidden], and texts, [texts, hidden].

        ``labels`` are the class numbers of the first texts: [labeled texts]. A labeled text weighs
        as much as the name where its class starts, and always belongs to its class.
        """
        center = texts.mean(axis=0)
        centered = texts - center
        scale = float(np.linalg.norm(centered, axis=1).mean())
        units, starts = normalize(centered), normalize(names - names.mean(axis=0))
        marks = np.eye(len(names), dtype=np.float32)[[] if labels is None else labels]
        vectors = starts = normalize(starts + marks.T @ units[: len(marks)])
        by_name = (units @ starts.T).argmax(axis=1)
        for least in [FROM_NAME] * (ROUNDS - 1) + [LAST_FROM_NAME]:
            assigned = softmax(units @ vectors.T / TEMPERATURE, axis=1)
            assigned[: len(marks)] = marks
            counts = assigned.sum(axis=0)[:, None]
            share = np.maximum(least, TEXTS_PER_NAME / (TEXTS_PER_NAME + counts))
            means = normalize(assigned.T @ units)
            vectors = normalize(share * starts + (1 - share) * means)
        expected = CONFIDENCE * (assigned.argmax(axis=1) == by_name).mean()
        similarities, (low, high) = centered @ vectors.T / scale, TEMPERATURES
        for _ in range(10):
            temperature = (low * high) ** 0.5
            confidence = softmax(similarities / temperature, axis=1).max(axis=1).mean()
            low, high = (temperature, high) if confidence > expected else (low, temperature)
        names_fit = (means * starts).sum(axis=1) >= MIN_SIMILARITY
        return cls(vectors, center, scale, temperature, names_fit)

    @cached_property
    def head(self) -> LinearHead:
        """The linear head whose logits are the similarities, divided by the temperature."""
        weight = self.vectors.astype(np.float64) / (self.scale * self.temperature)
        return LinearHead(weight, -(weight @ self.center), loss=0.0)
