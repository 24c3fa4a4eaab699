"""A worker process that trains several runs, because joining a group takes longer than a run."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.errors import InterruptionError
from finetune.training.trainer import Trainer

compute_gradients = Trainer.compute_gradients


@dataclass(frozen=True)
class Work:
    """A run, with events in its second process.

    Args:
        options: The options of the run.
        stopped_at: The step at whose start the process gets a signal, or 0.
        short_of_memory_at: The step in which the process runs out of memory, or 0.
    """

    options: dict[str, Any]
    stopped_at: int = 0
    short_of_memory_at: int = 0


def work(
    works: Sequence[Work], used: Path, found: Path, *, environment: Mapping[str, str], output: Path
) -> None:
    """Train runs, evaluate a finished run, and write the results of the main process.

    Args:
        works: The runs.
        used: A finished run.
        found: The file for its metrics and predictions.
        environment: The variables that torchrun would set.
        output: The file that standard output goes to.
    """
    os.environ |= environment
    with output.open("w") as file, redirect_stdout(file):
        os.dup2(file.fileno(), 1)
        torch.set_num_threads(1)
        for next_work in works:
            _run(next_work)
        evaluation = finetune.evaluate(used, device="cpu").to_json()
        answers = finetune.predict(used, ["Who was he?", "How far?", "Why?"], device="cpu")
    if environment["RANK"] == "0":
        found.write_text(json.dumps([evaluation, [answer.result for answer in answers]]))


def _run(work: Work) -> None:
    calls = 0

    def compute(*arguments: Any) -> Callable[[], torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == work.stopped_at:
            signal.raise_signal(signal.SIGTERM)
        finish = compute_gradients(*arguments)
        if calls == work.short_of_memory_at:
            raise MemoryError
        return finish

    if os.environ["RANK"] == "1":
        Trainer.compute_gradients = compute  # type: ignore[method-assign]
    with suppress(InterruptionError):
        finetune.run(**work.options)
