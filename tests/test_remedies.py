"""Commands in errors, warnings and checks are valid commands."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

import finetune
from finetune.commands.main import COMMANDS, cli

PACKAGE = Path(finetune.__file__).parent
FLAG = re.compile(r"(?<![\w-])(?<!var\()--[a-z][a-z-]*[a-z](?![\w{-])")
# From the name of a command to the end of its clause.
COMMAND = re.compile(rf"\bfinetune ((?:{'|'.join(COMMANDS)})\b(?:(?!  )[^,;:`'\")|\n])*)")
DOCTOR = re.compile(r"\bfinetune doctor\b[^,;`]*")
OTHER_PROGRAMS = re.compile(r"(?:pip|conda|torchrun|accelerate|git|nvidia-smi)\b[^;,`]*")
NVIDIA_SMI = {"--query-gpu", "--format"}


@cache
def flags_of(*names: str) -> frozenset[str]:
    """Return the flags of a command, such as ``cache``, ``clear``, and of its subcommands."""
    command: click.Command = cli
    for name in names:
        assert isinstance(command, click.Group), names
        subcommand = command.get_command(click.Context(command), name)
        assert subcommand is not None, names
        command = subcommand
    # Click keeps the help option of the first caller, and -h is part of it.
    options = command.get_params(click.Context(command, **cli.context_settings))
    own = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            own |= flags_of(*names, name)
    return frozenset(own)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of a module except docstrings, with ``{}`` in place of values."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in docstrings | parts:
            yield str(node.value)


TEXTS = [
    (path.relative_to(PACKAGE).as_posix(), text)
    for path in sorted(PACKAGE.rglob("*.py"))
    for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
    if "--" in text or "finetune " in text
]


def test_texts_contain_options_and_commands() -> None:
    assert sum(len(FLAG.findall(text)) for _, text in TEXTS) >= 100
    assert sum(len(COMMAND.findall(text)) for _, text in TEXTS) >= 20
    assert "--device" in flags_of("run")
    assert "--no-feature-cache" in flags_of("run")


def test_each_option_in_a_text_exists() -> None:
    """Options that only doctor has, such as --ops, are not a remedy for a run."""
    commands = frozenset().union(*(flags_of(name) for name in COMMANDS if name != "doctor"))
    for file, text in TEXTS:
        own = flags_of("doctor") if file == "commands/doctor.py" else frozenset()
        advice = DOCTOR.sub("", OTHER_PROGRAMS.sub("", text))
        unknown = set(FLAG.findall(advice)) - commands - own
        assert unknown <= NVIDIA_SMI, (file, text)


def test_each_command_in_a_text_exists_and_has_its_options() -> None:
    for file, text in TEXTS:
        for line in (found.rstrip(".") for found in COMMAND.findall(text)):
            names = [line.split()[0]]
            group = cli.get_command(click.Context(cli), names[0])
            if isinstance(group, click.Group):
                assert line.split()[1] in group.list_commands(click.Context(group)), (file, text)
                names.append(line.split()[1])
            assert set(FLAG.findall(line)) <= flags_of(*names), (file, text)
