"""The variables of a launcher in any subset, and closed standard streams."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import Command, finetune_in_a_child

LAUNCH = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize("missing", LAUNCH)
def test_an_incomplete_launch_is_ignored_with_a_warning(
    missing: str, command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCH.keys() - {missing}:
        monkeypatch.setenv(name, LAUNCH[name])
    assert command("predict", finished_run, "How many?").output.count("How many?") == 1
    shown = command("evaluate", finished_run)
    assert shown.code == 0, shown.errors
    assert f"a launcher also sets {missing}" in shown.errors


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["x", "-1", "7.5", "9"])
def test_ranks_that_make_no_sense_are_refused(
    name: str, value: str, command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, number in {**LAUNCH, name: value}.items():
        monkeypatch.setenv(variable, number)
    if (name, value) != ("WORLD_SIZE", "9"):
        command("evaluate", finished_run).assert_refused(2, f"{name}={value}")


def test_other_commands_are_refused_in_several_processes(finished_run: Path) -> None:
    environment = {**LAUNCH, "RANK": "0", "LOCAL_RANK": "0"}
    shown = finetune_in_a_child("predict", finished_run, "text", environment=environment)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "finetune predict runs in one process, but a launcher started 2" in shown.stderr


def in_a_shell(line: str, folder: Path) -> int:
    command = f"{sys.executable} -m finetune {line}"
    return subprocess.run(["sh", "-c", command], cwd=folder, stdin=subprocess.DEVNULL).returncode


def test_a_run_with_closed_streams_writes_no_progress_into_its_files(
    finished_run: Path, tmp_path: Path
) -> None:
    repeated = f"run {finished_run} --output-dir closed"
    assert in_a_shell(f"{repeated} <&- >&- 2>&-", tmp_path) == 0
    config, expected = (
        (run / "config.yaml").read_text() for run in (tmp_path / "closed", finished_run)
    )
    assert len(config.splitlines()) == len(expected.splitlines())
