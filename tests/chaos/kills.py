"""Kills runs at random moments and resumes them until they end.

Run as a program it is the process from which runs are forked, so that they import nothing again:
``kills.py MODEL FOLDER KILLS SEED`` prints one JSON object.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "data": "questions",
    "device": "cpu",
    "max_train_samples": 32,
    "batch_size": 8,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 2,
}
"""Two epochs of four updates: checkpoints after updates 2, 4, 6 and 8, the best after 4 and 8."""


def train(run: Path, model: Path) -> None:
    """Start a run, or resume it where it has stopped."""
    import finetune

    options = OPTIONS | {"model": str(model), "output_dir": str(run)}
    finetune.run(**options, resume_from_checkpoint="auto")


def train_in_a_child(run: Path, model: Path, *, kill_after_seconds: float | None) -> int:
    """Fork a process that trains and return its status; kill it some time after its journal began.

    Negative seconds are counted from the fork: the run may still be loading.
    """
    journal, begun = run / "metrics.jsonl", time.time_ns()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.dup2(devnull, sys.stderr.fileno())
            train(run, model)
            status = 0
        finally:
            os._exit(status)
    if kill_after_seconds is not None:
        while kill_after_seconds > 0 and not is_newer(journal, begun):
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                return ended[1]
            time.sleep(0.001)
        time.sleep(abs(kill_after_seconds))
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def is_newer(file: Path, moment_ns: int) -> bool:
    """Return whether a file was written after a moment."""
    return file.exists() and file.stat().st_mtime_ns > moment_ns


def journal_of(run: Path) -> list[Any]:
    """Return what the journal says but for speed and memory."""
    mood = {"examples_per_second", "memory_bytes", "held_bytes"}
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: one for name, one in row.items() if name not in mood} for row in rows]


def result_of(run: Path) -> list[Any]:
    """Return what must not depend on kills."""
    weights = (run / "model" / "model.safetensors").read_bytes()
    return [weights, journal_of(run), sorted(path.name for path in run.iterdir())]


def lost_updates(run: Path) -> int:
    """Return the updates between the newest checkpoint and the newest row of the journal."""
    saved = [int(path.name[5:]) for path in run.glob("checkpoints/step-*") if "." not in path.name]
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if saved else []
    return max((json.loads(line)["update"] - max(saved) for line in lines), default=0)


def kill_runs(model: Path, folder: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill so many runs, each once or more at random moments, and compare how they end."""
    # Once here, so that what takes long the first time is done before the fork.
    train(folder / "warm", model)
    begun, whole = time.time_ns(), folder / "whole"
    assert train_in_a_child(whole, model, kill_after_seconds=None) == 0
    loaded, ended = ((whole / name).stat().st_mtime_ns for name in ("config.yaml", "report.html"))
    loading_seconds, training_seconds = (loaded - begun) / 1e9, (ended - loaded) / 1e9
    chance = random.Random(seed)
    expected, same, most_lost, killed = result_of(whole), 0, 0, 0
    for number in range(kills):
        run = folder / str(number)
        for _ in range(chance.randint(1, 3)):
            latest = training_seconds if chance.random() < 0.8 else -loading_seconds
            moment = chance.uniform(0, latest)
            killed += train_in_a_child(run, model, kill_after_seconds=moment) == signal.SIGKILL
            most_lost = max(most_lost, lost_updates(run))
        status = train_in_a_child(run, model, kill_after_seconds=None)
        same += status == 0 and result_of(run) == expected
        shutil.rmtree(run)
    return {"runs": kills, "same": same, "killed": killed, "most_lost_updates": most_lost}


if __name__ == "__main__":
    model, folder, kills, seed = sys.argv[1:]
    found = kill_runs(Path(model), Path(folder), kills=int(kills), seed=int(seed))
    sys.stdout.write(json.dumps(found))
