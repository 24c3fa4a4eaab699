"""Kills at random points. The environment variable ``KILLED_RUNS=N`` sets the number of runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_result(tiny_folder: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("kills.py")
    runs = int(os.environ.get("KILLED_RUNS", "100"))
    arguments = [str(tiny_folder), str(tmp_path), str(runs)]
    child = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["same"] == runs, found
    assert found["killed"] >= 1, found
