"""How far a run is, and its best validation so far."""

import sys
from dataclasses import dataclass


@dataclass
class Progress:
    """The progress of a run; ``seconds`` includes validation and saving.

    ``unlabeled`` has the number of unlabeled texts that a head was fitted on, and the fraction of
    test rows that a head without them predicts differently.
    ``validations_since_best`` counts validations in a row that improved neither score nor loss.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    best_score: float | None = None
    best_loss: float = sys.float_info.max
    best_step: int = 0
    lowest_loss: float | None = None
    validations_since_best: int = 0
    unlabeled: dict[str, float] | None = None

    def note_validation(self, *, score: float, loss: float) -> bool:
        """Return whether a validation has the best score so far, or an equal one and less loss."""
        # On few examples, the accuracy can stand still while the loss still falls.
        is_best = self.best_score is None or (score, -loss) > (self.best_score, -self.best_loss)
        is_lowest = self.lowest_loss is None or loss < self.lowest_loss
        if is_best:
            self.best_score, self.best_loss, self.best_step = score, loss, self.steps
        if is_lowest:
            self.lowest_loss = loss
        self.validations_since_best = 0 if is_best or is_lowest else self.validations_since_best + 1
        return is_best
