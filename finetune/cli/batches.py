"""Shows batch sizes, found or foretold, on standard output."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.cli.console import LITERAL, show_lines

Row = Mapping[str, Any]


def show_results(results: Sequence[Row], *, folder: str) -> None:
    """Print what was found, a line a device and mode."""
    table = _table("device", "mode", numbers=(
        "tokens", "largest", "fails", "GiB", "of", "fastest", "use", "probes", "s",
    ))  # fmt: skip
    for one in results:
        table.add_row(
            one["device"],
            _mode(one),
            str(one["max_length"]),
            f"{one['max_verified']:,}",
            "-" if one["first_failed"] is None else f"{one['first_failed']:,}",
            _gibibytes(one["peak_bytes"]),
            _gibibytes(one["budget_bytes"]),
            f"{one['fastest']:,}",
            f"{one['recommended']:,}",
            str(len(one["probes"])),
            f"{one['seconds']:.0f}",
        )
    Console(**LITERAL).print(table)
    notes = [note for one in results for note in _notes(one)]
    show_lines(*notes, f"figures and picture: {folder}")


def show_estimates(estimates: Sequence[Row]) -> None:
    """Print what is foretold, a line a length and mode, and what it rests on."""
    table = _table("machine", "mode", numbers=("tokens", "batch", "from", "to", "GiB", "of"))
    for one in estimates:
        table.add_row(
            one["machine"],
            _mode(one),
            str(one["max_length"]),
            f"{one['batch']:,}",
            f"{one['lowest_batch']:,}",
            f"{one['highest_batch']:,}",
            _gibibytes(one["peak_bytes"]),
            _gibibytes(one["budget_bytes"]),
        )
    Console(**LITERAL).print(table)
    notes = [note for one in estimates for note in _notes(one)]
    modes_by_basis: dict[str, list[str]] = {}
    for one in estimates:
        modes_by_basis.setdefault(one["basis"], []).append(_mode(one))
    bases = [
        f"{', '.join(dict.fromkeys(modes))}: {basis}" for basis, modes in modes_by_basis.items()
    ]
    show_lines(
        "These are estimates: nothing was run on such a machine. They rest on", *bases, *notes
    )


def _table(*names: str, numbers: Sequence[str]) -> Table:
    table = Table(*names, box=None, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _mode(one: Row) -> str:
    is_undivided = one["mode"] != "full" and not one["stores_features"]
    return f"{one['mode']}, core each update" if is_undivided else one["mode"]


def _notes(one: Row) -> list[str]:
    where = f"{one['mode']} at {one['max_length']} tokens"
    notes = []
    if one["prefix_batch"] is not None:
        notes.append(
            f"{where}: the frozen core, which runs once, takes --eval-batch-size "
            f"{one['prefix_batch']:,}"
        )
    if one.get("predicted_maximum"):
        notes.append(
            f"{where}: time ended the search; memory is predicted to hold "
            f"{one['predicted_maximum']:,} rows"
        )
    return notes


def _gibibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.2f}"
