"""The learning rate of each update: up in a line, then down in a line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to a peak and linear decay to zero, as a function of the update.

    Args:
        peak: Highest learning rate.
        warmup_updates: Updates until the peak is reached.
        total_updates: Updates of the run.

    >>> schedule = Schedule(peak=1.0, warmup_updates=2, total_updates=4)
    >>> [schedule.learning_rate_at(update) for update in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    peak: float
    warmup_updates: int
    total_updates: int

    def learning_rate_at(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0; never zero, so none is wasted."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        decaying = self.total_updates - self.warmup_updates
        return self.peak * (self.total_updates - update) / max(1, decaying)
