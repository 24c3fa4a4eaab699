"""The learning rate of each step: up in a line, then down in a line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to a peak and linear decay to zero, as a function of the step.

    >>> schedule = Schedule(peak=1.0, warmup_steps=2, total_steps=4)
    >>> [schedule.learning_rate_at(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; never zero, so none is wasted."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decaying = self.total_steps - self.warmup_steps
        return self.peak * (self.total_steps - step) / max(1, decaying)
