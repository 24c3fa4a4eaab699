import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete
from tiny_runs import Command

from finetune.commands.main import COMMANDS, cli
from finetune.config.schema import OPTIONS
from finetune.devices import DEVICE_NAMES

HEAVY = ("torch", "transformers", "pydantic", "datasets", "numpy", "rich")


def completions(line: str) -> set[str]:
    """Return what a shell is emitted after the line, by a child process as the shell starts one."""
    words = {"COMP_WORDS": f"finetune {line}", "COMP_CWORD": str(len(line.split(" ")))}
    child = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "finetune"],
        env=os.environ | words | {"_FINETUNE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in child.stderr.splitlines()}
    assert "click" in imported
    assert imported.isdisjoint(HEAVY)
    return {answer.partition(",")[2] for answer in child.stdout.splitlines()}


def test_commands_complete() -> None:
    assert completions("") == set(COMMANDS)
    assert completions("conf") == {"config"}


@pytest.mark.parametrize("command", ["run", "config show"])
def test_every_option_of_the_schema_completes(command: str) -> None:
    flags = {option.flag for option in OPTIONS.values()}
    assert flags <= completions(f"{command} --")


def test_choices_complete() -> None:
    assert completions("run --device ") == set(DEVICE_NAMES)
    assert completions("run --save-strategy e") == {"epoch"}


@pytest.mark.parametrize(
    "line",
    [
        *("run --data", "run --config", "run --model", "run --resume-from-checkpoint"),
        *("doctor --model", "evaluate --data"),
    ],
)
def test_files_and_folders_complete(line: str) -> None:
    shell = BashComplete(cli, {}, "finetune", "_FINETUNE_COMPLETE")
    assert [one.type for one in shell.get_completions(line.split(), "no")] == ["file"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_takes_its_script(command: Command) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_FINETUNE_COMPLETE={shell}_complete" in command("completion", shell).output
    script = command("completion", "bash").output
    child = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p finetune"], capture_output=True, text=True
    )
    assert (child.returncode, child.stderr) == (0, "")
