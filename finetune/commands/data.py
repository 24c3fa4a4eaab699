"""``finetune data``: checks the data of a run or audits its labels."""

import csv
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from annotated_types import Ge, Le

from finetune.commands import flags
from finetune.commands.console import shorten, show_lines, show_table
from finetune.errors import DataError, UsageError
from finetune.events import Event, WarningMessage, current_receiver, sent_to
from finetune.ownership import OwnFolder
from finetune.runs.folder import find_several, next_free_folder
from finetune.runs.guess import GuessedConfig, guess_options, measure_tokens
from finetune.tasks.tables import format_cell, format_value

if TYPE_CHECKING:
    from finetune.audit.audit import Audit

EXAMPLES = """\b
Examples:
  finetune data check reviews.csv
  finetune data check hub:owner/name --json
"""
AUDITS_FOLDER = Path("audits")
WORST = 10
AUDIT_EXAMPLES = """\b
Examples:
  finetune data audit reviews.csv --model minilm
  finetune data audit runs/reviews-folds    more accurate, after run --folds
  finetune run reviews.csv --corrections audits/reviews/suspects.csv
"""


def check_data(loaded: GuessedConfig) -> dict[str, Any]:
    """Check the data of a run with these options. ``lengths`` is None without a tokenizer."""
    from finetune.data.check import check_splits, suggest_changes
    from finetune.data.dataset import split_table
    from finetune.data.load import load_data
    from finetune.runs.linear_head import estimate_linear_head

    config, warnings = loaded.config, list[str]()
    forward = current_receiver()

    def forward_and_keep(event: Event) -> None:
        if isinstance(event, WarningMessage):
            warnings.append(event.message)
        forward(event)

    with sent_to(forward_and_keep):
        data = load_data(config.data, read=loaded.read)
        splits = split_table(data.splits, config.data, task=data.task)
        names = [name for name in splits if name in data.splits]
        original = {name: data.splits[name] for name in names}
        measured = measure_tokens(original, config.model)
    findings, lengths = check_splits(original, data.task), measured and measured[0]
    return {
        "data": config.data.data,
        "rows_of_a_run": {split: len(rows) for split, rows in splits.items()},
        "lengths": lengths,
        "suggestions": suggest_changes(findings, lengths=lengths),
        "linear_head_estimate": estimate_linear_head(config, splits["train"], data),
        "warnings": warnings,
        **findings,
    }


def audit_data(
    file: str | None = None,
    *,
    output_dir: str | Path | None = None,
    folds: Annotated[int, Ge(2), Le(100)] = 5,
    **options: Any,
) -> "Audit":
    """Audit labels. For a cross-validation folder, use its out-of-fold predictions.

    Args:
        output_dir: Folder to write. Default: audits/NAME, with the name of the data.
        folds: Number of cross-validation folds.
    """
    from finetune.audit.audit import audit
    from finetune.data.load import source_name
    from finetune.report.page import SUSPECTS, audit_files

    several = None if file is None else find_several(Path(file).expanduser())
    out_of_fold, is_run = None, False
    if several and several.kind == "folds":
        out_of_fold, file = several.path, str(several.run(several.numbers[0]).path)
    elif file is not None:
        is_run = flags.find_run(Path(file)) is not None
    loaded = flags.load(file=file, **options)
    guessed = GuessedConfig(loaded.config, loaded.sources)
    with suppress(DataError):  # a table without labels can still be audited for duplicates
        guessed = guess_options(loaded)
    config = guessed.config
    path = Path(output_dir or AUDITS_FOLDER / source_name(config.data.data))
    if _has_decisions(path / SUSPECTS):
        if output_dir:
            raise UsageError(
                f"{path / SUSPECTS} contains decisions, which another audit would overwrite",
                remedy="choose another folder with --output-dir",
            )
        path = next_free_folder(AUDITS_FOLDER, path.name)
    folder = OwnFolder(path, "audit")
    folder.check()
    result = audit(config, folds=folds, is_run=is_run, out_of_fold=out_of_fold, read=guessed.read)
    folder.write_all(audit_files(result))
    return replace(result, folder=str(folder.path))


def _has_decisions(suspects: Path) -> bool:
    """Return whether an audit would overwrite decisions."""
    if not suspects.is_file():
        return False
    with suspects.open(newline="", encoding="utf-8", errors="replace") as file:
        return any(row.get("decision") for row in csv.DictReader(file))


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Check data for problems, or audit its labels."""


@command.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.chosen_options("model", "revision", "max_length", sections=("data",))
@flags.with_display
def check(*, display: flags.Display, **options: Any) -> None:
    """Report problems in the data and suggest changes.

    FILE is a table, a dataset, a configuration or a run folder, as for finetune run.

    The report lists rows and classes, duplicates, contradictory labels, test rows that are also in
    the training split, and lengths in tokens. If the model is on this machine, the report also
    includes the cross-validated accuracy of a linear head on the frozen encoder. A run that trains
    all layers is usually better.
    """
    display.run(lambda: check_data(guess_options(flags.load(**options))), _show_check)


def _show_check(report: Mapping[str, Any]) -> None:
    from finetune.data.check import CHECKS

    all_rows, lengths = report["rows"], report["lengths"]
    classes = {
        split: {**report["classes"][split], "all rows": rows} for split, rows in all_rows.items()
    }
    _show_by_split("class", classes)
    _show_by_split("labels", report["figures"])
    run = ", ".join(f"{rows:,} {split}" for split, rows in report["rows_of_a_run"].items())
    show_lines(f"split sizes in a run: {run}")
    counts: dict[str, dict[str, float]] = {split: {} for split in all_rows}
    examples = []
    for name, check in CHECKS.items():
        for split, finding in report[name].items():
            counts[split] |= {title: finding[key] for key, title in check.titles.items()}
            examples += [_describe(example, name, split) for example in finding["examples"]]
    _show_by_split("texts", counts)
    if lengths:
        titles = {"cut_rows": "truncated", "cut_share": "truncated, fraction"}
        tokens = {
            split: {titles.get(name, name): value for name, value in values.items()}
            for split, values in lengths.splits.items()
        }
        _show_by_split("tokens per text", tokens)
        show_lines(
            f"Tokens are counted by the {lengths.model} tokenizer. --max-length is "
            f"{lengths.max_length}; {lengths.suggested_max_length} would truncate "
            f"{lengths.beyond_suggested:,} texts."
        )
    if examples:
        show_lines()
        show_table(("example", "text"), examples)
    if report["linear_head_estimate"]:
        show_lines(*report["linear_head_estimate"].lines)
    for suggestion in report["suggestions"]:
        show_lines(suggestion.message, f"  try: {suggestion.remedy}")


def _describe(example: Any, check: str, split: str) -> tuple[str, str]:
    if isinstance(example, str):
        return f"{check.replace('_', ' ')} in {split}", shorten(example)
    train, labels = example.get("train_labels"), example.get("labels") or [example["label"]]
    in_train = f"{' and '.join(train)} in train, " if train else ""
    return f"{in_train}{' and '.join(labels)} in {split}", shorten(example["text"])


def _show_by_split(title: str, by_split: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table with one column per split and one line per name."""
    if names := dict.fromkeys(name for values in by_split.values() for name in values):
        rows = [
            (shorten(name), *(format_value(values.get(name, "")) for values in by_split.values()))
            for name in names
        ]
        show_lines()
        show_table((title, *by_split), rows, numbers=list(by_split))


@command.command("audit", cls=flags.GroupedCommand, epilog=AUDIT_EXAMPLES)
@flags.source_options
@flags.options_of(audit_data)
@flags.chosen_options(
    *("model", "revision", "max_length", "pooling", "device", "precision", "cache_dir"),
    sections=("data",),
    without=["unlabeled"],
)
@flags.with_display
def audit_command(*, display: flags.Display, **options: Any) -> None:
    """Find wrong labels and near duplicates.

    FILE is a table, a dataset, a configuration or a run folder, as for finetune run.

    Each row is predicted by a linear head that was fitted without it, on the frozen encoder. For
    a cross-validation folder (finetune run --folds), its predictions are used as well.
    """
    display.run(audit_data, _show_audit, **options)


def _show_audit(result: "Audit") -> None:
    from finetune.report.page import summarize_audit

    sample = f" (a sample of {result.sampled:,})" if result.sampled < result.rows else ""
    show_lines(f"{result.rows:,} rows of {result.data}{sample}, {len(result.classes)} classes")
    table = summarize_audit(result)
    show_table(table.columns, table.rows, numbers=("rows",))
    if result.suspects:
        show_lines("most suspicious labels", "")
        names = [
            "row",
            *["id"] * ("id" in result.suspects[0]),
            "text",
            "label",
            "suggested",
            "loss",
            *["words"] * ("words" in result.suspects[0]),
        ]
        rows = [[shorten(format_cell(row[name])) for name in names] for row in result.suspects]
        show_table(names, rows[:WORST], numbers=("row", "loss"))
    show_lines(f"written: {result.folder}")
