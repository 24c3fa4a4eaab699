"""One probe: real updates at a batch size, and what they took."""

from dataclasses import dataclass
from functools import partial

from finetune.batch_finder.trial import Trial

# Shorter times say more about the machine's other work, and about a GPU that was idle before, than
# about the batch size.
_LEAST_TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class Measurement:
    """What updates at a batch size took, as in an ``Outcome``.

    The peak is None where the process can't measure its own memory.
    """

    peak_bytes: int | None
    examples_per_second: float
    is_strained: bool


def measure(trial: Trial, *, batch_size: int, budget_bytes: int) -> Measurement:
    """Take at least two updates, three on a GPU, and evaluate one batch, of one size.

    Each call starts from no more than the weights, as a run does, so that it does not matter what
    was measured before. Allocations beyond the budget fail, with whatever PyTorch raises then.
    Extracting the features of one batch counts as an update.
    """
    memory = trial.device.memory
    trial.begin()
    memory.release()
    memory.cap(budget_bytes)
    memory.reset_peak()
    # The first update also pays for new memory, the optimizer's state and kernels.
    trial.take_update(batch_size=batch_size)
    best_rate = _best_rate(trial, batch_size=batch_size)
    trial.evaluate(batch_size=batch_size)
    return Measurement(memory.held_peak_bytes(), best_rate, memory.retried_allocations() > 0)


def _best_rate(trial: Trial, *, batch_size: int) -> float:
    """Return the best examples per second of some series of updates, each twice as long."""
    update = partial(trial.take_update, batch_size=batch_size)
    updates = 1 if trial.device.torch_device.type == "cpu" else 2
    best_rate = timed_seconds = 0.0
    while timed_seconds < _LEAST_TIMED_SECONDS:
        seconds = trial.device.time_calls(update, calls=updates)
        best_rate = max(best_rate, updates * batch_size / seconds)
        timed_seconds += seconds
        updates *= 2
    return best_rate
