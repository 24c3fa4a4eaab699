"""Commands and options in the README, in docs/ and in the help exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from test_remedies import flags_of
from tiny_runs import Command

from finetune.commands.main import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The measurement log also contains commands of other tools and of earlier versions.
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name not in ("ARCHITECTURE.md", "measurements.md")
}
TEXTS = [README, *PAGES.values()]
SHELL = [
    line.partition("#")[0].strip()
    for text in TEXTS
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
]
# A command ends before a comment, a gap in a table of examples, a pipe or a closing quote.
TYPED = re.compile(r"\bfinetune (?:--?)?[a-z][^\n#`|>)]*?(?=  |\n|[#`|>)]|$)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
CODE = re.compile(r"```.*?```|^    .*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
# Blocks marked as bash contain options of other programs.
OTHER_PROGRAMS = re.compile(r"```bash.*?```|\b(?:pip|torchrun|hf|git) [^`\n]*", re.DOTALL)
# A tiny model replaces models from the Hub or from PyPI.
QUICK = ["--max-train-samples", "32", "--max-steps", "1", "--device", "cpu"]


@pytest.fixture
def prepared_folder(
    tmp_path: Path, tiny_folder: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the files that the commands of the README and the pages mention."""
    rows = "".join(
        f"{number} is {'good' if number % 2 else 'bad'},{number % 2}\n" for number in range(40)
    )
    (tmp_path / "reviews.csv").write_text("review,stars\n" + rows)
    (tmp_path / "tickets.csv").write_text("text\n" + "my card was charged twice\nlog me in\n" * 9)
    (tmp_path / "classes.csv").write_text("text,label\nmy card,billing\nlog in,login\n")
    (tmp_path / "new.csv").write_text("text\n3 is good\n")
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
    """Return the commands in the code of a text."""
    code = "\n".join(re.findall(r"```sh\n.*?```|^    .*$|`finetune[^`]*`", text, re.M | re.S))
    return [line.strip() for line in TYPED.findall(code)]


def test_commands_in_readme_pages_and_help_are_valid(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: None)
    monkeypatch.setattr("finetune.commands.flags.find_latest", lambda path: path)
    in_helps = [line for text in epilogs() for line in TYPED.findall(text)]
    for line in [*(line for text in TEXTS for line in commands_in(text)), *in_helps]:
        outcome = command(*shlex.split(line)[1:])
        # A sentence may mention a command without its arguments.
        is_incomplete = re.search(r"[Mm]issing argument|requires an argument", outcome.errors)
        assert outcome.code == 0 or is_incomplete, (line, outcome.errors)


@pytest.mark.slow
def test_readme_commands_run(prepared_folder: Path, command: Command) -> None:
    for line in SHELL:
        arguments = shlex.split(line)[1:]
        if arguments[0] in (
            "bench",
            "find-batch",
        ):  # other tests run these commands with fewer trials
            continue
        if arguments[0] == "run":
            is_unlabeled = "tickets.csv" in arguments
            arguments += QUICK[-2:] if is_unlabeled else QUICK
            arguments += ["--model", str(prepared_folder / "model")]
            if not {"reviews.csv", "questions", "tickets.csv"} & set(arguments):
                arguments += ["--data", "questions"]  # instead of TREC, which is not available
        elif arguments[:2] == ["data", "check"]:
            arguments += ["--model", str(prepared_folder / "model")]
        outcome = command(*arguments)
        assert outcome.code == 0, (line, outcome.errors)


def test_python_code_in_readme_and_pages_runs(prepared_folder: Path) -> None:
    codes = [code for text in TEXTS for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert len(codes) == 2
    for code in codes:
        quick = code.replace('model="minilm"', 'model="model", max_train_samples=32, max_steps=1')
        exec(compile(quick, "README.md", "exec"), {})


def test_pages_are_short() -> None:
    assert len(README.split()) <= 1_100
    assert len(re.findall(r"(?<![\w.-])\d+(?:[.,:]\d+)*", README)) <= 40
    assert all(len(text.splitlines()) <= 150 for text in TEXTS[1:])


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_options_in_pages_exist(name: str) -> None:
    """Commands have only their own options, which another test checks."""
    known = frozenset().union(*(flags_of(command) for command in COMMANDS))
    text = OTHER_PROGRAMS.sub("", README if name == "README.md" else PAGES[name])
    mentioned = {flag for code in CODE.findall(text) for flag in FLAG.findall(code)}
    assert mentioned <= known, name


def test_links_in_pages_exist() -> None:
    for name, text in {"../README.md": README, **PAGES}.items():
        for link, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)]*)\)", text):
            page = (ROOT / "docs" / name).parent / link if link else ROOT / "docs" / name
            assert page.exists(), (name, link)
            titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, (name, link, anchor)
