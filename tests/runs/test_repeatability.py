"""The same command and seed give the same weights on one machine, busy or not."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_runs import QUICK, flags


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Start this many processes that compute without end."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_same_command_gives_the_same_weights_on_an_idle_and_a_busy_machine(
    tiny_folder: Path, tmp_path: Path
) -> None:
    def train(name: str) -> bytes:
        """Train in a new process and return the weights."""
        options = QUICK | {"model": str(tiny_folder), "output_dir": str(tmp_path / name)}
        command = [sys.executable, "-m", "finetune", "run", *flags(**options)]
        child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert child.returncode == 0, child.stderr
        return (tmp_path / name / "model" / "model.safetensors").read_bytes()

    first, second = train("first"), train("second")
    with busy_processes(2):
        beside_others = train("beside-others")
    assert first == second
    assert first == beside_others
