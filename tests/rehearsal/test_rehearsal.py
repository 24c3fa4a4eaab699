"""Runs the commands with their defaults on simulated machines, and on the GPU of this machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rehearsal.crashes import BRANCHES, UNCOVERED, modules_with_branches
from rehearsal.script import STEPS
from rehearsal.stand_ins import REHEARSALS

QUICK = ("mac-8gb",)


def rehearse(*arguments: str) -> Sequence[str]:
    """Return the lines of a rehearsal, which must pass."""
    script = Path(__file__).with_name("rehearse.py")
    result = subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def count_steps(machines: Sequence[str]) -> int:
    return sum(len(STEPS) - len(REHEARSALS[name].left_out) for name in machines)


def test_commands_work_on_a_small_mac() -> None:
    assert len(rehearse("--machines", *QUICK)) == count_steps(QUICK)


@pytest.mark.slow
def test_commands_work_on_other_machines() -> None:
    machines = [name for name in REHEARSALS if name not in QUICK]
    assert len(rehearse("--machines", *machines)) == count_steps(machines)


@pytest.mark.slow
@pytest.mark.skipif(
    "PLANTED_CRASHES" not in os.environ, reason="takes minutes: set PLANTED_CRASHES=1"
)
def test_planted_crashes_are_detected() -> None:
    machines = [*REHEARSALS]
    lines = rehearse("--crashes", "--machines", *machines)
    assert len(lines) == count_steps(machines) + len(BRANCHES)


def test_machine_dependent_modules_are_listed() -> None:
    assert modules_with_branches() <= {branch.module for branch in BRANCHES} | UNCOVERED.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [pytest.param("mps", marks=pytest.mark.mps), pytest.param("cuda", marks=pytest.mark.cuda)],
)
def test_commands_work_on_a_gpu(device: str) -> None:
    assert len(rehearse("--device", device)) == len(STEPS)
