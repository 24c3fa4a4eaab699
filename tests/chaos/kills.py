"""Kills runs at random moments of their processor time and resumes them until they end.

Run as a program it is the process from which runs are forked, so that they import nothing again:
``kills.py MODEL FOLDER RUNS SEED`` prints one JSON object.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

Outcomes = Counter[str]
ROWS = 40
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 2,
}
"""Two epochs of four steps: checkpoints after steps 2, 4, 6 and 8, the best after 4 and 8."""


def train(run: Path, model: Path) -> None:
    """Start a run, or resume it."""
    import finetune

    data = write_rows(run.parent / "rows.csv")
    options = OPTIONS | {"data": data, "model": str(model), "output_dir": str(run)}
    finetune.run(**options, resume_from_checkpoint="auto")


def write_rows(file: Path) -> str:
    """Write a small table unless it exists, and return its name."""
    if not file.exists():
        rows = [f"what is {row}?,{'even' if row % 2 == 0 else 'odd'}" for row in range(ROWS)]
        file.write_text("\n".join(["text,label", *rows]))
    return str(file)


def train_in_a_child(
    run: Path, model: Path, *, killed_after_seconds: float = 0
) -> tuple[int, float]:
    """Fork a process that trains and return its status and how much processor time it took.

    After so much of it, unless that is 0, the kernel kills it by SIGPROF: where it is then depends
    less on the machine's other work than after some time.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.dup2(devnull, sys.stderr.fileno())
            signal.setitimer(signal.ITIMER_PROF, killed_after_seconds)
            train(run, model)
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def journal_of(run: Path) -> list[Any]:
    """Return the rows of the journal without speed and memory."""
    mood = {"examples_per_second", "memory_bytes", "reserved_bytes"}
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: one for name, one in row.items() if name not in mood} for row in rows]


def result_of(run: Path) -> list[Any]:
    """Return everything that must not depend on kills."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    return [weights, journal_of(run), names]


def kill(seed: str, *, model: Path, folder: Path, seconds: float, expected: list[Any]) -> Outcomes:
    """Kill a run once or twice, resume it to its end, and count how it ended."""
    run, chance, outcomes = folder / seed, random.Random(seed), Outcomes({"runs": 1})
    for _ in range(chance.choice([1, 1, 2])):
        moment = chance.uniform(0, seconds)
        status, _ = train_in_a_child(run, model, killed_after_seconds=moment)
        outcomes["killed"] += status == signal.SIGPROF
    status, _ = train_in_a_child(run, model)
    outcomes["same"] += status == 0 and result_of(run) == expected
    shutil.rmtree(run)
    return outcomes


def kill_runs(model: Path, folder: Path, *, runs: int, seed: int) -> Outcomes:
    """Kill this many runs at random moments, one per core at a time."""
    import torch

    torch.set_num_threads(1)
    # Done before the fork, because it is slow the first time.
    train(folder / "warm", model)
    status, seconds = train_in_a_child(folder / "whole", model)
    assert status == 0
    expected = result_of(folder / "whole")
    act = partial(kill, model=model, folder=folder, seconds=seconds, expected=expected)
    seeds = [f"{seed}-{number}" for number in range(runs)]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(runs, os.cpu_count() or 1), mp_context=fork) as workers:
        return sum(workers.map(act, seeds), Outcomes())


if __name__ == "__main__":
    model, folder, runs, seed = sys.argv[1:]
    outcomes = kill_runs(Path(model), Path(folder), runs=int(runs), seed=int(seed))
    sys.stdout.write(json.dumps(outcomes))
