"""The child process that tries batch sizes.

Its first request is ``{"case": ..., "limit_bytes": ..., "budget_bytes": ...}``, with the budget of
the process before it or null; then come batch sizes. It replies with its ``budget_bytes``, that it
is ``ready``, a ``measurement`` of each size, or what is ``unsupported`` or another ``failure``,
after which it ends. PyTorch is imported before the first request, so that a process can be kept
ready.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from finetune.batch_finder.case import Case
from finetune.batch_finder.child import connect_to_parent
from finetune.errors import ModelUnsupported

if TYPE_CHECKING:
    from finetune.batch_finder.trial_model import TrialModel

MODULE = "finetune.batch_finder.worker"
# Shorter times say more about the machine's other work, and about a GPU that was idle before, than
# about the batch size.
_MIN_TIMED_SECONDS = 1.0


def main() -> None:
    """Serve the parent until it closes standard input."""
    requests, reply = connect_to_parent()
    from finetune.batch_finder.trial_model import build_trial_model
    from finetune.devices.select import select_device

    request = requests.get()
    case = Case.from_json(request["case"])
    device = select_device(case.device, emit=lambda _: None)
    budget_bytes = request["budget_bytes"] or device.memory.budget_bytes(request["limit_bytes"])
    reply({"budget_bytes": budget_bytes})
    try:
        device.memory.set_memory_limit(budget_bytes)
        model = build_trial_model(case, device=device)
        reply({"ready": True})
        while True:
            measurement = measure(model, batch_size=requests.get(), budget_bytes=budget_bytes)
            reply({"measurement": dataclasses.asdict(measurement)})
    except ModelUnsupported as error:
        reply({"unsupported": error.message, "remedy": error.remedy})
    # Of every kind that PyTorch, the model or the machine can raise: the parent judges it.
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        reply({"failure": reason, "is_out_of_memory": device.memory.is_out_of_memory(error)})


@dataclass(frozen=True)
class Measurement:
    """What steps at a batch size took; the peak is None where the process can't measure its own."""

    peak_bytes: int | None
    examples_per_second: float
    is_strained: bool


def measure(model: "TrialModel", *, batch_size: int, budget_bytes: int) -> Measurement:
    """Take at least two steps, three on a GPU, and evaluate one batch, of one size.

    Each call starts from no more than the weights, as a run does. Allocations beyond the budget
    fail, with whatever PyTorch raises then.
    """
    device, memory = model.device, model.device.memory
    model.begin()
    memory.release()
    memory.set_memory_limit(budget_bytes)
    memory.reset_peak()
    step = partial(model.take_step, batch_size=batch_size)
    # The first step also pays for new memory, the optimizer's state and kernels.
    step()
    # The best of some series of steps, each twice as long.
    steps = 1 if device.is_reference else 2
    best_rate = timed_seconds = 0.0
    while timed_seconds < _MIN_TIMED_SECONDS:
        seconds = device.time_calls(step, calls=steps)
        best_rate = max(best_rate, steps * batch_size / seconds)
        timed_seconds += seconds
        steps *= 2
    model.evaluate(batch_size=batch_size)
    return Measurement(memory.held_peak_bytes(), best_rate, memory.retried_allocations() > 0)


if __name__ == "__main__":
    main()
