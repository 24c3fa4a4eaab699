"""Which text is labeled next.

First come texts that are spread out over the features (k-means++), then in turn the two texts that
the head is least certain of, the most likely text of the class with the fewest labels, and a text
drawn at random. The random texts are drawn once, and no other way of choosing shows them. So they
stay a fair sample, and only they measure how good the model is.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from finetune.web.journal import How, Labels

SPREAD_TEXTS = 20
# The ways of choosing after that, again and again.
TURNS: tuple[How, ...] = ("uncertain", "rare", "uncertain", "random")
RANDOM_FRACTION, MAX_RANDOM_TEXTS = 0.25, 1_000
# The text shown is, among this many least certain ones, the least similar to labeled texts.
UNCERTAIN_TEXTS = 5


@dataclass(frozen=True)
class Scores:
    """Predictions of the head for all texts: probabilities are float32 [texts, classes]."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    is_multi_label: bool

    @cached_property
    def margins(self) -> NDArray[np.float32]:
        """How far each text is from being undecided: [texts]."""
        if self.is_multi_label:
            return np.asarray(np.abs(self.probabilities - 0.5).min(axis=1))
        best = np.partition(self.probabilities, -2, axis=1)[:, -2:]
        return np.asarray(best[:, 1] - best[:, 0])

    def predict(self, row: int) -> tuple[tuple[str, ...], float]:
        """Return the predicted classes of a text, and how probable they are."""
        row_probabilities = self.probabilities[row]
        if not self.is_multi_label:
            best = int(row_probabilities.argmax())
            return (self.classes[best],), float(row_probabilities[best])
        is_likely = row_probabilities > 0.5
        certain = np.where(is_likely, row_probabilities, 1 - row_probabilities)
        return tuple(np.array(self.classes)[is_likely].tolist()), float(certain.min())


class Selection:
    """Chooses texts; ``features`` are unit vectors, float32 [texts, hidden], once there are any."""

    def __init__(self, is_done: NDArray[np.bool_]) -> None:
        self._random = np.random.default_rng(0)
        order = self._random.permutation(len(is_done))
        order = order[~is_done[order]]
        drawn = min(int(np.ceil(len(order) * RANDOM_FRACTION)), MAX_RANDOM_TEXTS)
        self.random_rows: NDArray[np.int64] = order[:drawn]
        self._other_rows: NDArray[np.int64] = order[drawn:]
        self._features: NDArray[np.float32] | None = None
        self._spread_rows: NDArray[np.int64] = np.empty(0, np.int64)

    def set_features(self, features: NDArray[np.float32]) -> None:
        """Use features from now on."""
        self._spread_rows = self._spread(features)
        self._features = features

    def _spread(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return rows as k-means++ draws its centers: far from those drawn before."""
        rows = self._other_rows
        if not len(rows):
            return rows
        chosen = [int(self._random.integers(len(rows)))]
        distances = np.full(len(rows), np.inf)
        while len(chosen) < min(SPREAD_TEXTS, len(rows)):
            similarities = features[rows] @ features[rows[chosen[-1]]]
            distances = np.minimum(distances, np.maximum(1 - similarities, 0))
            distances[chosen] = 0
            if not (total := distances.sum()):
                break
            chosen.append(int(self._random.choice(len(rows), p=distances / total)))
        return rows[chosen]

    def next(self, labels: Labels, scores: Scores | None) -> tuple[int, How] | None:
        """Return a row without a label and how it was chosen; None if every row has been shown."""
        seen = np.array([*labels.rows, *labels.skipped], np.int64)
        random_rows, rows, spread_rows = (
            candidates[~np.isin(candidates, seen)]
            for candidates in (self.random_rows, self._other_rows, self._spread_rows)
        )
        done = sum(how != "file" for how in labels.how.values()) + len(labels.skipped)
        if len(spread_rows) and (scores is None or done < SPREAD_TEXTS):
            return int(spread_rows[0]), "spread"
        how = TURNS[done % len(TURNS)]
        if len(random_rows) and (how == "random" or not len(rows)):
            return int(random_rows[0]), "random"
        if not len(rows):
            return None
        if scores is None or self._features is None:
            return int(rows[0]), "spread"
        if how == "rare":
            counts = labels.counts()
            rarest = min(scores.classes, key=lambda name: counts.get(name, 0))
            probabilities = scores.probabilities[rows, scores.classes.index(rarest)]
            return int(rows[probabilities.argmax()]), "rare"
        uncertain = rows[np.argsort(scores.margins[rows], kind="stable")[:UNCERTAIN_TEXTS]]
        if labels.rows:
            labeled = self._features[np.array([*labels.rows])]
            similarities = self._features[uncertain] @ labeled.T
            uncertain = uncertain[[similarities.max(axis=1).argmin()]]
        return int(uncertain[0]), "uncertain"


def find_contradictions(
    labels: Labels, scores: Scores, *, most: int = 50
) -> list[tuple[int, tuple[str, ...], float]]:
    """Return labeled rows that the head contradicts most: row, predicted classes, doubt in 0..1."""
    rows = [row for row, names in labels.rows.items() if {*names} <= {*scores.classes}]
    if not rows:
        return []
    is_label = np.array([[name in labels.rows[row] for name in scores.classes] for row in rows])
    probabilities = scores.probabilities[rows]
    if scores.is_multi_label:
        doubts = np.where(is_label, 1 - probabilities, probabilities).max(axis=1)
    else:
        doubts = 1 - (probabilities * is_label).sum(axis=1)
    ranked = [
        (rows[index], scores.predict(rows[index])[0], float(doubts[index]))
        for index in np.argsort(-doubts, kind="stable")[:most].tolist()
    ]
    return [each for each in ranked if {*each[1]} != {*labels.rows[each[0]]}]
