"""``finetune config``: shows, validates and copies configurations."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_table
from finetune.config.load import describe_presets, make_json_schema, presets_folder
from finetune.config.schema import HUB_PREFIX, OPTIONS, flag_of
from finetune.errors import UsageError
from finetune.files import escape_line, is_there, write_text_atomically
from finetune.ownership import check_output_file
from finetune.runs.guess import guess_options

EXAMPLES = """\b
Examples:
  finetune config show trec_head --seed 7       each value and its source
  finetune config cp trec_head mine.yaml        start from a preset
  finetune config validate mine.yaml
  finetune config schema > finetune.schema.json
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Show, validate and copy configurations."""


@command.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.config_options
@flags.with_display
def show(*, display: flags.Display, **options: Any) -> None:
    """Show the value of each option and its source.

    FILE is a table, a dataset, a configuration or a run folder, as for finetune run. The source of
    a value is the default, a guess, a file, an environment variable or a flag. Later sources
    override earlier sources.
    """
    with display.progress():
        loaded = flags.load(**options)
        if loaded.sources.get("data") == flag_of("data"):
            _check_data(loaded.config.data.data)
        loaded = guess_options(loaded)
    sources = dict.fromkeys(loaded.guesses, "guess") | loaded.sources
    names = ("section", "option", "value", "origin")
    rows = [
        (option.section, name, option.value_in(loaded.config), sources.get(name, "default"))
        for name, option in OPTIONS.items()
    ]
    facts = {"options": [dict(zip(names, row, strict=True)) for row in rows]}
    display.show(facts, lambda _: _show_options(rows))


def _show_options(rows: Sequence[tuple[str, str, Any, str]]) -> None:
    cells, shown = [], ""
    for section, name, value, source in rows:
        text = value if isinstance(value, str) else json.dumps(value)
        cells.append((section if section != shown else "", name, text, source))
        shown = section
    show_table(("section", "option", "value", "source"), cells)


def _check_data(data: str) -> None:
    names = OPTIONS["data"].names
    if not (data.startswith(HUB_PREFIX) or data in names or is_there(Path(data).expanduser())):
        remedy = f"use a file, one of {', '.join(names)}, or a preset: finetune config ls"
        raise UsageError(f"there is no file, dataset or preset {data}", remedy=remedy)


@command.command(epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, type=flags.NAME)
@flags.debug_option
def validate(*, files: tuple[str, ...]) -> None:
    """Validate YAML files, each on its own, without environment variables.

    The first invalid file ends the command with exit code 2.
    """
    from finetune.config.load import load_config

    for file in files:
        load_config(file=file)
        click.echo(f"{escape_line(file)}: valid")


@command.command(epilog=EXAMPLES)
@flags.debug_option
def schema() -> None:
    """Print the JSON Schema of the YAML files, for editors.

    Editors with the YAML language server find the schema through the first line of a file:
    # yaml-language-server: $schema=finetune.schema.json
    """
    click.echo(json.dumps(make_json_schema(), indent=2))


@command.command("ls", epilog=EXAMPLES)
@flags.with_json
def list_presets(*, display: flags.Display) -> None:
    """List the presets that come with the package."""
    presets = describe_presets()
    display.show({"presets": presets}, lambda _: show_table(("", ""), presets.items()))


@command.command("cp", epilog=EXAMPLES)
@click.argument("name")
@click.argument("file", required=False, type=flags.PATH)
@flags.debug_option
def copy(*, name: str, file: Path | None) -> None:
    """Copy the preset NAME to a new FILE, by default NAME.yaml in the current folder."""
    if name not in (presets := describe_presets()):
        remedy = f"use one of {', '.join(presets)}"
        raise UsageError(f"there is no preset {name}", remedy=remedy)
    file = file or Path(f"{name}.yaml")
    check_output_file(file)
    write_text_atomically(file, (presets_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    run = f"finetune run {shlex.quote(str(file))}"
    click.echo(escape_line(f"written: {file}; run it with: {run}"))
