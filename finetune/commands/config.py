"""``finetune config``: shows a configuration or lists the presets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_table
from finetune.config.load import describe_presets
from finetune.config.schema import HUB_PREFIX, OPTIONS, flag_of
from finetune.errors import UsageError
from finetune.files import is_there
from finetune.runs.guess import guess_options

EXAMPLES = """\b
Examples:
  finetune config show trec_head --seed 7       each value and its source
  finetune config show -c mine.yaml             also validates the file
  finetune config ls
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Show a configuration, or list the presets."""


@command.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.config_options
@flags.with_display
def show(*, display: flags.Display, **options: Any) -> None:
    """Show the value of each option and its source.

    FILE is a table, a dataset, a configuration or a run folder, as for finetune run. The source of
    a value is the default, a guess, a file, an environment variable or a flag. Later sources
    override earlier ones.
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
        raise UsageError(f"file, dataset or preset not found: {data}", remedy=remedy)


@command.command("ls", epilog=EXAMPLES)
@flags.with_json
def list_presets(*, display: flags.Display) -> None:
    """List the presets that come with the package."""
    presets = describe_presets()
    display.show({"presets": presets}, lambda _: show_table(("", ""), presets.items()))
