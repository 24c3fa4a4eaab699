"""The child process that trains at the batch sizes it receives: only it ends by a bad one.

It reads lines of JSON from standard input: first ``{"case": ..., "limit_bytes": ...,
"budget_bytes": ...}``, with the budget of the process before it or null, then batch sizes. It
answers with its ``budget_bytes`` as soon as it knows them, that it is ``ready``, a ``measurement``
of each size, or what is ``unsupported`` or another ``failure``, after which it ends. It also ends
when standard input does.

PyTorch, whose import takes seconds, is imported once the process is bound to its parent, and before
it reads anything, so that a process can be kept ready.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.batch_finder.case import Case
from finetune.devices.host import keep_freed_memory, look_for_garbage_seldom
from finetune.errors import ModelUnsupported

# prctl(2): which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the parent until it closes standard input."""
    end_with_parent()
    # As the command does.
    keep_freed_memory()
    look_for_garbage_seldom()
    orders = read_orders()
    answer = open_answers()
    from finetune.batch_finder.measure import measure
    from finetune.batch_finder.trial import build_trial
    from finetune.devices.select import select_device

    task = orders.get()
    case = Case.from_json(task["case"])
    device = select_device(case.device, emit=lambda _: None)
    budget_bytes = task["budget_bytes"] or device.memory.budget_bytes(task["limit_bytes"])
    answer({"budget_bytes": budget_bytes})
    try:
        device.memory.cap(budget_bytes)
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


def end_with_parent() -> None:
    """Let the kernel kill this process with its parent, and before others for memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Where a sandbox forbids this, the parent's watch and the cap remain.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def read_orders() -> "queue.SimpleQueue[Any]":
    """Return the lines of standard input as they come; end the process at once when it ends."""
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        # Unbuffered: a thread that waits within a buffer breaks the end of the process.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def open_answers() -> Callable[[Any], None]:
    """Return what writes a line to the parent; all that others print goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        stream.write(json.dumps(value) + "\n")

    return answer


if __name__ == "__main__":
    main()
