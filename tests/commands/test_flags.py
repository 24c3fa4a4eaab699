from pathlib import Path

import click
import pytest
from tiny_runs import Command, copy_run

from finetune.commands.flags import load
from finetune.commands.run import command as run_command
from finetune.config.schema import OPTIONS, flag_of


def test_each_option_in_the_schema_is_a_flag_of_run_with_its_default() -> None:
    flags = {one.name: one for one in run_command.params}
    for option in OPTIONS.values():
        flag = flags[option.name]
        assert isinstance(flag, click.Option)
        assert flag.opts == [option.flag]
        if option.default is not None and not isinstance(option.default, bool):
            assert f"[default: {option.default}".replace("_", "-") in str(flag.help)
    options = [one for one in flags.values() if isinstance(one, click.Option)]
    assert [one.name for one in options if not one.help] == []


@pytest.mark.parametrize("columns", ["80", "100"])
def test_run_help_fits_a_screen_and_help_all_lists_all_options(
    columns: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    short, full = command("run", "--help").output, command("run", "--help-all").output
    assert len(short.splitlines()) <= 60
    assert short.count("[FILE]") == 1
    assert all(f"{flag_of(name)} " in short for name, option in OPTIONS.items() if option.is_first)
    assert all(option.flag in full for option in OPTIONS.values())
    *_, trec = full.split("With --data trec:")
    assert "--data-dir" in trec
    assert "--data-dir" not in short


def test_help_mentions_guessing_only_for_commands_that_guess(command: Command) -> None:
    run, label = (" ".join(command(name, "--help").output.split()) for name in ("run", "label"))
    assert "Maximum tokens per text. [default: 128, or guessed for a table]" in run
    assert "Maximum tokens per text. [default: 128]" in label


def test_repeated_run_with_a_different_model_drops_the_revision(
    finished_run: Path, tmp_path: Path
) -> None:
    run = copy_run(finished_run, tmp_path / "run", revision="main")
    assert load(file=run).config.model.revision == "main"
    assert load(file=run, model="run/model").config.model.revision is None
