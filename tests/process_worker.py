"""Makes several runs in one process of a group: importing PyTorch takes longer than they do.

Its first argument is a JSON list: the options of each run, the number of the update at whose
beginning the second process gets a signal, and of that in which its memory runs out; 0 for none.
The second is a run that is used then, the third a file for what the main process finds.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.errors import Interrupted
from finetune.runs import encoding
from finetune.training import training_state

torch.set_num_threads(1)
# All tables have many texts, so that the processes encode shares of them.
encoding.MANY_TEXTS, encoding.PART_BYTES = 1, 500
accumulate_gradients = training_state.accumulate_gradients


def run(options: dict[str, Any], *, stopped_at: int, short_of_memory_at: int) -> None:
    """Make a run; the second process meets what is to happen."""
    calls = 0

    def accumulate(*arguments: Any, **others: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == stopped_at:
            signal.raise_signal(signal.SIGTERM)
        loss = accumulate_gradients(*arguments, **others)
        if calls == short_of_memory_at:
            raise MemoryError
        return loss

    if os.environ["RANK"] == "1":
        training_state.accumulate_gradients = accumulate
    with suppress(Interrupted):
        finetune.run(**options)


RUNS, USED, FOUND = sys.argv[1:]
for options, stopped_at, short_of_memory_at in json.loads(RUNS):
    run(options, stopped_at=stopped_at, short_of_memory_at=short_of_memory_at)
evaluation = finetune.evaluate(USED, device="cpu").to_json()
answers = finetune.predict(USED, ["Who was he?", "How far?", "Why?"], device="cpu")
if os.environ["RANK"] == "0":
    found = [evaluation, [answer.result for answer in answers]]
    Path(FOUND).write_text(json.dumps(found))
