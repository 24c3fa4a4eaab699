"""SIGKILL at random moments; ``KILLED_RUNS=300`` in the environment for more of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("KILLED_RUNS", "2"))


def test_killed_runs_end_as_if_nothing_had_happened(tiny_folder: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("kills.py")
    arguments = [str(tiny_folder), str(tmp_path), str(KILLS), "0"]
    child = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["same"] == found["runs"] == KILLS
    assert found["killed"] >= 1
    # Checkpoints are two updates apart, and the journal may be one update ahead of the next.
    assert found["most_lost_updates"] <= 2
