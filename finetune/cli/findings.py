"""Shows what a check of data has found, on standard output."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Findings = Mapping[str, Any]

FIGURES_OF_TEXTS = (
    ("rows that repeat an earlier one", "repeats", "rows"),
    ("texts that they repeat", "repeats", "texts"),
    ("rows that do so, case and spaces aside", "repeats", "rows_up_to_case"),
    ("texts with several labels", "conflicts", "texts"),
    ("texts of hardly a character", "short_texts", "rows"),
    ("rows that stand in train too", "overlap", "rows"),
    ("rows that stand there with another label", "overlap", "disagreeing"),
)
LONGEST_EXAMPLE = 60


def show_findings(findings: Findings) -> None:
    """Print what ``finetune.api.check_data.check_data`` returns: tables, and what to change."""
    console = Console(highlight=False)
    run = ", ".join(f"{rows:,} {split}" for split, rows in findings["rows_of_a_run"].items())
    _show(console, _rows_table(findings), f"rows of a run: {run}")
    _show(console, _texts_table(findings))
    if lengths := findings["lengths"]:
        enough = f"--max-length {lengths['suggested_max_length']} is enough"
        _show(console, _lengths_table(lengths), f"as {lengths['model']} counts; {enough}")
    if examples := list(_examples(findings)):
        _show(console, _examples_table(examples))
    for suggestion in findings["suggestions"]:
        _show(console, suggestion["finding"], f"  try: {suggestion['remedy']}")


def _show(console: Console, *parts: Table | str) -> None:
    """Print a paragraph; a line is never broken, so that it can be searched for."""
    console.print()
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def _rows_table(findings: Findings) -> Table:
    splits = findings["rows"]
    table = _table("class", *splits)
    for name in findings["classes"]["train"]:
        _add_numbers(table, name, [findings["classes"][split][name] for split in splits])
    _add_numbers(table, "all rows", splits.values())
    return table


def _texts_table(findings: Findings) -> Table:
    splits = findings["rows"]
    table = _table("texts", *splits)
    for title, kind, figure in FIGURES_OF_TEXTS:
        found = findings[kind]
        if found:
            numbers = [found[split][figure] if split in found else None for split in splits]
            _add_numbers(table, title, numbers)
    return table


def _lengths_table(lengths: Findings) -> Table:
    longer = f"over {lengths['max_length']}"
    table = _table("tokens of a text", "mean", "p50", "p95", "p99", "max", longer, "share")
    for split, metrics in lengths["splits"].items():
        table.add_row(
            split,
            *(f"{metrics[name]:,.1f}" for name in ("mean", "p50", "p95", "p99")),
            f"{metrics['max']:,}",
            f"{metrics['cut_rows']:,}",
            f"{metrics['cut_share']:.1%}",
        )
    return table


def _examples_table(examples: Iterable[tuple[str, str]]) -> Table:
    table = Table("example", "text", box=None, pad_edge=False)
    for description, text in examples:
        line = Text(" ".join(text.split()))
        line.truncate(LONGEST_EXAMPLE, overflow="ellipsis")
        table.add_row(Text(description), line)
    return table


def _examples(findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield what is odd about a text, and the text."""
    for split, repeats in findings["repeats"].items():
        for text in repeats["examples"]:
            yield f"repeated in {split}", text
    for split, conflicts in findings["conflicts"].items():
        for example in conflicts["examples"]:
            yield f"{' and '.join(example['labels'])} in {split}", example["text"]
    for split, short in findings["short_texts"].items():
        for text in short["examples"]:
            yield f"short in {split}", text
    for split, overlap in findings["overlap"].items():
        for example in overlap["examples"]:
            labels = " and ".join(example["train_labels"])
            yield f"{labels} in train, {example['label']} in {split}", example["text"]


def _table(*columns: str) -> Table:
    """Return a table of numbers whose first column says what they are."""
    table = Table(*columns[:1], box=None, pad_edge=False)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _add_numbers(table: Table, title: str, numbers: Iterable[int | None]) -> None:
    table.add_row(Text(title), *("" if number is None else f"{number:,}" for number in numbers))
