"""Kills runs at random points of their CPU time and resumes them until they finish.

``kills.py MODEL FOLDER RUNS`` prints the number of killed runs, and how many runs have the same
result as an uninterrupted run. Runs are forked from this program, to import the package only once.
"""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.files import read_jsonl

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 2,
}
"""Two epochs of four steps. Checkpoints after steps 2, 4, 6 and 8, validations after 4 and 8."""


def train(run: Path, model: Path) -> None:
    """Start a run, or resume it."""
    options = {"data": str(run.parent / "rows.csv"), "model": str(model), "output_dir": str(run)}
    finetune.run(**OPTIONS, **options, resume_from_checkpoint="auto")


def train_in_a_child(
    run: Path, model: Path, *, killed_after_seconds: float = 0
) -> tuple[int, float]:
    """Fork a process that trains, and return its status and its CPU time in seconds.

    The kernel kills it with SIGPROF after ``killed_after_seconds`` of CPU time, unless that is 0.
    CPU time depends less on the load of the machine than wall time.
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


def result_of(run: Path) -> list[Any]:
    """Return everything except speed and memory, which may differ after a kill."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    changing = {"examples_per_second", "memory_bytes", "reserved_bytes"}
    rows = read_jsonl(run / "metrics.jsonl")
    return [weights, names, [{name: row[name] for name in row.keys() - changing} for row in rows]]


def kill_runs(model: Path, folder: Path, *, runs: int) -> dict[str, int]:
    """Kill each run once or twice at random points, and resume it until it finishes."""
    lines = [f"what is {row}?,{('even', 'odd')[row % 2]}" for row in range(40)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines]))
    torch.set_num_threads(1)
    train(folder / "warm", model)  # before the first fork, because the first run is slow
    status, seconds = train_in_a_child(folder / "whole", model)
    assert status == 0
    expected, killed, same = result_of(folder / "whole"), 0, 0
    for number in range(runs):
        run, chance = folder / str(number), random.Random(number)
        for _ in range(chance.choice([1, 1, 2])):
            moment = chance.uniform(0, seconds)
            status, _ = train_in_a_child(run, model, killed_after_seconds=moment)
            killed += status == signal.SIGPROF
        status, _ = train_in_a_child(run, model)
        same += status == 0 and result_of(run) == expected
        shutil.rmtree(run)
    return {"killed": killed, "same": same}


if __name__ == "__main__":
    model, folder, runs = sys.argv[1:]
    sys.stdout.write(json.dumps(kill_runs(Path(model), Path(folder), runs=int(runs))))
