"""``finetune data``."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import as_text, shorten, show_json, show_lines, show_table
from finetune.commands.options import (
    GroupedCommand,
    chosen_options,
    config_option,
    load,
    output_options,
)
from finetune.commands.progress import showing
from finetune.config.schema import DataConfig

if TYPE_CHECKING:
    from finetune.commands.check_data import DataReport
    from finetune.data.check import LengthFindings

EXAMPLES = """\b
Examples:
  finetune data check                               TREC
  finetune data check --data reviews.csv            your own file
  finetune data check --data hub:owner/name --json
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Check the data of a run."""


@command.command(cls=GroupedCommand, epilog=EXAMPLES)
@config_option
@chosen_options(*(option.name for option in fields(DataConfig)), "model", "revision", "max_length")
@output_options
def check(
    *, config: str | None, as_json: bool, quiet: bool, no_progress: bool, **flags: Any
) -> None:
    """Print statistics of the data and suggest what to change.

    Rows and classes, duplicates, texts with contradictory labels, test rows that are in the
    training split too, and lengths in tokens. Of the model, only the tokenizer is loaded.
    """
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.commands.check_data import check_data

        report = check_data(load(flags, config=config).config, emit=emit)
    if as_json:
        show_json(report.to_json())
    else:
        _show_report(report)


def _show_report(report: "DataReport") -> None:
    """Print tables of what was found, and what to change."""
    found, splits = report.findings, list(report.findings.rows)
    classes = {
        name: [found.classes[split][name] for split in splits] for name in found.classes["train"]
    }
    _show_counts("class", splits, classes | {"all rows": list(found.rows.values())})
    if names := list(found.figures["train"]):
        rows = [(name, *(as_text(found.figures[one][name]) for one in splits)) for name in names]
        show_lines()
        show_table(("labels", *splits), rows, numbers=splits)
    run = ", ".join(f"{rows:,} {split}" for split, rows in report.rows_of_a_run.items())
    show_lines(f"rows of a run: {run}")
    counts: dict[str, dict[str, int]] = {}
    for by_split in found.checks.values():
        for split, finding in by_split.items():
            for count in finding.counts:
                if count.title:
                    counts.setdefault(count.title, {})[split] = count.number
    shown = {title: [own.get(split) for split in splits] for title, own in counts.items()}
    _show_counts("texts", splits, shown)
    if report.lengths:
        _show_lengths(report.lengths)
    findings = [one for by_split in found.checks.values() for one in by_split.values()]
    if examples := [(one.title, shorten(one.text)) for own in findings for one in own.examples]:
        show_lines()
        show_table(("example", "text"), examples)
    for suggestion in report.suggestions:
        show_lines(suggestion.finding, f"  try: {suggestion.remedy}")


def _show_counts(
    title: str, splits: Sequence[str], counts: Mapping[str, Sequence[int | None]]
) -> None:
    show_lines()
    rows = [
        (shorten(name), *("" if one is None else f"{one:,}" for one in numbers))
        for name, numbers in counts.items()
    ]
    show_table((title, *splits), rows, numbers=splits)


def _show_lengths(lengths: "LengthFindings") -> None:
    numbers = ("mean", "p50", "p95", "p99", "max", f"over {lengths.max_length}", "share")
    rows = [
        (
            split,
            *(f"{one:,.1f}" for one in (tokens.mean, tokens.p50, tokens.p95, tokens.p99)),
            f"{tokens.max:,}",
            f"{tokens.cut_rows:,}",
            f"{tokens.cut_share:.1%}",
        )
        for split, tokens in lengths.splits.items()
    ]
    show_lines()
    show_table(("tokens of a text", *numbers), rows, numbers=numbers)
    limit, beyond = f"--max-length {lengths.suggested_max_length}", lengths.beyond_suggested
    show_lines(
        f"tokens counted by the tokenizer of {lengths.model}; longest text: "
        f"{lengths.splits['train'].max:,} tokens, "
        + (f"{limit} truncates {beyond:,} texts" if beyond else f"fits {limit}")
    )
