"""Signals at random moments of a command, in fresh processes: the exit code is the signal's."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from held import FINETUNE, Start
from tiny_runs import flags

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS = 5.0


@pytest.mark.slow
def test_a_signal_at_any_moment_ends_the_command_with_its_code(
    start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    turns = int(os.environ.get("SIGNALS", "15"))
    wrong, rng = [], random.Random(turns)
    for turn in range(turns):
        number, after = NUMBERS[turn % 3], rng.uniform(0, SECONDS)
        arguments = flags(model=tiny_folder, num_train_epochs=500, output_dir=tmp_path / str(turn))
        process = start(*FINETUNE, "run", *arguments)
        time.sleep(after)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        # Before Python has started, the signal itself ends the process.
        if process.returncode not in (-number, 128 + number) or "unexpected" in errors:
            wrong.append((number, after, process.returncode, errors[-200:]))
    assert not wrong
