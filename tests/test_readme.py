"""The commands of the README and of the pages in docs/ do what these say."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from tiny_runs import Command

from finetune.commands.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("training", "data", "batch-sizes", "devices", "deployment", "python")
TEXTS = [README, *((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in PAGES)]
SHELL = [
    line.partition("#")[0].strip()
    for text in TEXTS
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
]
# A command ends before a comment, a gap in a table of examples, a pipe or a closing quote.
TYPED = re.compile(r"\bfinetune (?:--?)?[a-z][^\n#`|>)]*?(?=  |\n|[#`|>)]|$)")
# A tiny model stands for those that come from the Hub or from PyPI.
QUICK = ["--max-train-samples", "32", "--max-steps", "1", "--device", "cpu"]


@pytest.fixture
def prepared_folder(
    tmp_path: Path, tiny_folder: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with all that the README's commands name."""
    rows = "".join(
        f"{number} is {'good' if number % 2 else 'bad'},{number % 2}\n" for number in range(40)
    )
    (tmp_path / "reviews.csv").write_text("review,stars\n" + rows)
    (tmp_path / "new.csv").write_text("review\n3 is good\n")
    (tmp_path / "questions.txt").write_text("Who wrote Faust?\nHow far is the moon?\n")
    (tmp_path / "model").symlink_to(tiny_folder)
    (tmp_path / "RUN").symlink_to(finished_run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def epilogs(command: click.Command = cli) -> Iterator[str]:
    """Yield the examples below the help of a command and of all its subcommands."""
    yield command.epilog or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if subcommand := command.get_command(context, name):
                yield from epilogs(subcommand)


def commands_in(text: str) -> list[str]:
    """Return the commands that a text names in code."""
    code = "\n".join(re.findall(r"```sh\n.*?```|^    .*$|`finetune[^`]*`", text, re.M | re.S))
    return [line.strip() for line in TYPED.findall(code)]


def test_readme_and_helps_have_commands() -> None:
    assert len(SHELL) >= 12
    assert all(line.startswith("finetune ") for line in SHELL)
    assert sum(len(commands_in(text)) for text in TEXTS) >= 60
    assert sum(len(TYPED.findall(text)) for text in epilogs()) >= 20


def test_every_command_of_readme_and_helps_can_be_typed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: None)
    monkeypatch.setattr("finetune.commands.flags.find_latest", lambda path: path)
    in_helps = [line for text in epilogs() for line in TYPED.findall(text)]
    for line in [*(line for text in TEXTS for line in commands_in(text)), *in_helps]:
        outcome = command(*shlex.split(line)[1:])
        assert outcome.code == 0, (line, outcome.errors)


@pytest.mark.slow
def test_commands_of_the_readme_run(prepared_folder: Path, command: Command) -> None:
    for line in SHELL:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "bench":  # it has tests of its own and takes minutes
            continue
        if arguments[0] == "run":
            arguments += [*QUICK, "--model", str(prepared_folder / "model")]
            if "reviews.csv" not in arguments:
                arguments += ["--data", "questions"]  # for TREC, which is not here
        elif arguments[:2] == ["data", "check"]:
            arguments += ["--model", str(prepared_folder / "model")]
        elif arguments[0] == "find-batch":
            arguments += ["--model", str(prepared_folder / "model"), "--limit", "1"]
        outcome = command(*arguments)
        assert outcome.code == 0, (line, outcome.errors)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this Mac could run it")
def test_command_for_a_mac_fails_elsewhere_with_the_reason(command: Command) -> None:
    [line] = re.findall(r"^ +(finetune run .*--device mps)$", README, re.MULTILINE)
    command(*shlex.split(line)[1:], "--dry-run").assert_refused(4, "MPS")


def test_python_of_the_readme_and_the_pages_runs(prepared_folder: Path) -> None:
    codes = [code for text in TEXTS for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert len(codes) == 2
    for code in codes:
        quick = code.replace('model="minilm"', 'model="model", max_train_samples=32, max_steps=1')
        exec(compile(quick, "README.md", "exec"), {})


def test_pages_are_short() -> None:
    assert len(README.splitlines()) <= 200
    assert all(len(text.splitlines()) <= 150 for text in TEXTS[1:])


def test_every_command_is_in_the_table() -> None:
    table = README.partition("## Commands")[2].partition("## Python")[0]
    assert set(re.findall(r"`finetune ([\w-]+)", table)) == set(COMMANDS)
