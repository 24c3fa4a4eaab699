"""Environment variables of launchers such as torchrun."""

from pathlib import Path

import pytest
from tiny_runs import Command, finetune_in_a_child

LAUNCH = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip


def test_incomplete_launcher_variables_are_ignored(
    command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCH.keys() - {"MASTER_PORT"}:
        monkeypatch.setenv(name, LAUNCH[name])
    assert command("predict", finished_run, "How many?").output.count("How many?") == 1
    assert command("evaluate", finished_run).code == 0


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "9"), ("LOCAL_RANK", "-1")])
def test_invalid_ranks_are_rejected(
    name: str, value: str, command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, number in {**LAUNCH, name: value}.items():
        monkeypatch.setenv(variable, number)
    command("evaluate", finished_run).assert_rejected(2, f"{name}={value}")


def test_other_commands_are_rejected_under_a_launcher(finished_run: Path) -> None:
    environment = {**LAUNCH, "RANK": "0", "LOCAL_RANK": "0"}
    shown = finetune_in_a_child("predict", finished_run, "text", environment=environment)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "finetune predict runs in one process, but a launcher started 2" in shown.stderr
