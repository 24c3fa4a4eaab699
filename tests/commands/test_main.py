import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tiny_runs import Command, finetune_in_a_child

from finetune.commands import main
from finetune.commands.main import COMMANDS, cli
from finetune.distributed import Launch
from finetune.errors import ProcessLostError

HEAVY = {"torch", "transformers", "pydantic", "datasets", "numpy", "rich"}


def test_help_lists_commands_and_exit_codes(command: Command) -> None:
    outcome = command("--help")
    assert outcome.code == 0
    assert outcome.errors == ""
    for name, purpose in COMMANDS.items():
        assert name in outcome.output
        assert purpose.split()[0] in outcome.output
    assert "130 interrupted" in " ".join(outcome.output.split())


def pages(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield contexts of a command and its subcommands on an 80-column terminal."""
    settings = {"parent": parent, "info_name": name, "terminal_width": 78}
    context = click.Context(command, **settings, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from pages(below, name, context)


def test_each_help_page_fits_80_columns_and_has_two_examples() -> None:
    for page in pages(cli, "finetune"):
        text = page.command.get_help(page)
        assert max(map(len, text.splitlines())) <= 80, page.command_path
        assert "\\b" not in text, page.command_path
        assert len(re.findall(r"^ +(.* \| )?finetune \w", text, re.M)) >= 2, page.command_path


def test_ctrl_c_during_import_exits_without_a_traceback() -> None:
    code = """
import runpy, signal, sys
class Interruption:
    def find_spec(self, name, *_):
        if name == "click":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interruption())
runpy.run_module("finetune", run_name="__main__")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (-signal.SIGINT, "", "")


def test_unexpected_error_suggests_debug(
    command: Command, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.commands.predict.load", lambda *_, **__: 1 / 0)
    command("predict", finished_run, "text").assert_rejected(1, "ZeroDivisionError", "--debug")


def test_debug_adds_a_traceback_and_keeps_the_exit_code() -> None:
    arguments = ("predict", "run", "--data", "missing.txt")
    plain = finetune_in_a_child(*arguments)
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    debugged = finetune_in_a_child(*arguments, "--debug")
    assert debugged.returncode == 2
    assert debugged.stderr.startswith("Traceback (most recent call last):")
    assert debugged.stderr.endswith(plain.stderr)
    assert plain.stdout == debugged.stdout == ""


def test_help_does_not_import_heavy_packages() -> None:
    code = f"""
import contextlib, io, json, sys
from finetune.commands.main import COMMANDS, main
for arguments in [["--help"], *([name, "--help"] for name in COMMANDS)]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
print(json.dumps(sorted({HEAVY!r} & sys.modules.keys())))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(child.stdout) == [], child.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_on_stdout_is_reported() -> None:
    command = f"{sys.executable} -m finetune config show > /dev/full"
    child = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert child.returncode == 1
    error, remedy = child.stderr.splitlines()
    assert "No space left on device" in error
    assert remedy.startswith("  try: ")


def test_output_escapes_characters_that_the_encoding_lacks() -> None:
    environment = {"PYTHONIOENCODING": "ascii"}
    shown = finetune_in_a_child("config", "show", "--model", "é—x", environment=environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\\xe9\\u2014x" in shown.stdout


@pytest.mark.parametrize(("local_rank", "is_reported"), [(0, True), (1, False)])
def test_first_process_of_each_host_reports_a_lost_process(
    local_rank: int,
    is_reported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = Launch(rank=2 + local_rank, world_size=4, local_rank=local_rank, local_world_size=2)
    monkeypatch.setattr(main, "read_launch", lambda: launch)
    monkeypatch.setattr(main, "_OTHERS_FIRST_SECONDS", 0)
    monkeypatch.setattr("os._exit", lambda code: None)
    main._leave(ProcessLostError("another process ended", remedy="see its error"), [])
    assert ("another process ended" in capsys.readouterr().err) is is_reported
