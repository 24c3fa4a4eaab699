"""Class prototypes: a linear head without labels, from names of classes and unlabeled texts.

Each class starts as the features of its name. The mean of the names differs from the mean of the
texts, so each is centered on its own. Then, again and again, the texts are softly assigned to the
most similar prototypes, which move towards their texts. No parameter of the encoder changes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from finetune.training.linear_head import LinearHead, normalize

# With a temperature of 0.1, BANKING77, HWU64 and CLINC150 lose 0.4 to 2.2 points. Classes that are
# forced to have the same size lose 1 to 8, most where a class is rare (docs/measurements.md).
TEMPERATURE = 0.05
# Weight of the name in its prototype; the rest is the weight of the texts. With few texts, the name
# weighs as much as 20 of them: otherwise, 100 to 400 texts make names worse (docs/measurements.md).
FROM_NAME, TEXTS_PER_NAME, ROUNDS = 0.3, 20, 20


@dataclass(frozen=True)
class Prototypes:
    """Unit vectors of the classes, [classes, hidden], about the ``center`` of the texts, [hidden].

    Without texts, the prototypes are the names.
    """

    vectors: NDArray[np.float32]
    center: NDArray[np.float32]
    scale: float  # mean norm of the centered texts

    @classmethod
    def of(cls, names: NDArray[np.float32], texts: NDArray[np.float32]) -> "Prototypes":
        """Fit prototypes to features of names, [classes, hidden], and texts, [texts, hidden]."""
        center = texts.mean(axis=0)
        centered = texts - center
        scale = float(np.linalg.norm(centered, axis=1).mean())
        units, starts = normalize(centered), normalize(names - names.mean(axis=0))
        vectors = starts
        for _ in range(ROUNDS):
            assigned = softmax(units @ vectors.T / TEMPERATURE, axis=1)
            counts = assigned.sum(axis=0)[:, None]
            share = np.maximum(FROM_NAME, TEXTS_PER_NAME / (TEXTS_PER_NAME + counts))
            vectors = normalize(share * starts + (1 - share) * normalize(assigned.T @ units))
        return cls(vectors, center, scale)

    @cached_property
    def head(self) -> LinearHead:
        """The linear head whose logits are the similarities, divided by the temperature."""
        weight = self.vectors.astype(np.float64) / (self.scale * TEMPERATURE)
        return LinearHead(weight, -(weight @ self.center), loss=0.0)
