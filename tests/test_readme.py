"""The README's commands do what it says."""

import re
import shlex
from pathlib import Path

import pytest
import tiny_runs
import torch
from tiny_models import save_tiny_model
from tiny_runs import Command, run_tiny

command = tiny_runs.command  # the fixture
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHELL = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
# A tiny model stands for those that come from the Hub or from PyPI.
QUICK = ["--max-train-samples", "32", "--max-steps", "1", "--device", "cpu"]


@pytest.fixture
def prepared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the README's commands name."""
    rows = "".join(
        f"{number} is {'good' if number % 2 else 'bad'},{number % 2}\n" for number in range(40)
    )
    (tmp_path / "reviews.csv").write_text("review,stars\n" + rows)
    (tmp_path / "questions.txt").write_text("Who wrote Faust?\nHow far is the moon?\n")
    model = save_tiny_model(tmp_path / "model")
    run_tiny(tmp_path / "RUN", model=model, max_steps=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_has_commands() -> None:
    assert len(SHELL) >= 12
    assert all(line.startswith("finetune ") for line in SHELL)


def test_commands_of_the_readme_run(prepared_folder: Path, command: Command) -> None:
    for line in SHELL:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "run":
            arguments += [*QUICK, "--model", str(prepared_folder / "model")]
            if not {"--data", "reviews.yaml"} & set(arguments):
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


def test_python_of_the_readme_runs(prepared_folder: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = code.replace('model="minilm"', 'model="model", max_train_samples=32, max_steps=1')
    exec(compile(code, "README.md", "exec"), {})


def test_every_command_is_in_the_table() -> None:
    from finetune.cli.main import COMMANDS

    table = README.partition("## Commands")[2].partition("## Train")[0]
    assert set(re.findall(r"`finetune ([\w-]+)", table)) == set(COMMANDS)
