"""The child process that trains at the batch sizes it receives: only it ends by a bad one.

It reads lines of JSON from standard input: first ``{"case": ..., "limit_bytes": ...,
"budget_bytes": ...}``, with the budget of the process before it or null, then batch sizes. It
answers with its ``budget_bytes`` as soon as it knows them, that it is ``ready``, a ``measurement``
of each size, or what is ``unsupported`` or another ``failure``, after which it ends. It also ends
when standard input does.

PyTorch, whose import takes seconds, is imported once the process is bound to its parent, and before
it reads anything, so that a process can be kept ready.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from finetune.batch_finder.case import Case
from finetune.batch_finder.child import begin_child
from finetune.errors import ModelUnsupported

if TYPE_CHECKING:
    from finetune.batch_finder.trial import Trial

MODULE = "finetune.batch_finder.worker"
# Shorter times say more about the machine's other work, and about a GPU that was idle before, than
# about the batch size.
_MIN_TIMED_SECONDS = 1.0


def main() -> None:
    """Serve the parent until it closes standard input."""
    orders, answer = begin_child()
    from finetune.batch_finder.trial import build_trial
    from finetune.devices.select import select_device

    task = orders.get()
    case = Case.from_json(task["case"])
    device = select_device(case.device, emit=lambda _: None)
    budget_bytes = task["budget_bytes"] or device.memory.budget_bytes(task["limit_bytes"])
    answer({"budget_bytes": budget_bytes})
    try:
        device.memory.set_memory_limit(budget_bytes)
        trial = build_trial(case, device=device)
        answer({"ready": True})
        while True:
            measurement = measure(trial, batch_size=orders.get(), budget_bytes=budget_bytes)
            answer({"measurement": dataclasses.asdict(measurement)})
    except ModelUnsupported as error:
        answer({"unsupported": error.message, "remedy": error.remedy})
    # Of every kind that PyTorch, the model or the machine can raise: the parent judges it.
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        answer({"failure": reason, "is_out_of_memory": device.memory.is_out_of_memory(error)})


@dataclass(frozen=True)
class Measurement:
    """What steps at a batch size took, as in an ``Outcome``.

    The peak is None where the process can't measure its own memory.
    """

    peak_bytes: int | None
    examples_per_second: float
    is_strained: bool


def measure(trial: "Trial", *, batch_size: int, budget_bytes: int) -> Measurement:
    """Take at least two steps, three on a GPU, and evaluate one batch, of one size.

    Each call starts from no more than the weights, as a run does, so that it does not matter what
    was measured before. Allocations beyond the budget fail, with whatever PyTorch raises then.
    Extracting the features of one batch counts as a step.
    """
    memory = trial.device.memory
    trial.begin()
    memory.release()
    memory.set_memory_limit(budget_bytes)
    memory.reset_peak()
    # The first step also pays for new memory, the optimizer's state and kernels.
    trial.take_step(batch_size=batch_size)
    best_rate = _best_rate(trial, batch_size=batch_size)
    trial.evaluate(batch_size=batch_size)
    return Measurement(memory.held_peak_bytes(), best_rate, memory.retried_allocations() > 0)


def _best_rate(trial: "Trial", *, batch_size: int) -> float:
    """Return the best examples per second of some series of steps, each twice as long."""
    step = partial(trial.take_step, batch_size=batch_size)
    steps = 1 if trial.device.torch_device.type == "cpu" else 2
    best_rate = timed_seconds = 0.0
    while timed_seconds < _MIN_TIMED_SECONDS:
        seconds = trial.device.time_calls(step, calls=steps)
        best_rate = max(best_rate, steps * batch_size / seconds)
        timed_seconds += seconds
        steps *= 2
    return best_rate


if __name__ == "__main__":
    main()
