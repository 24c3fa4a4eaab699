"""``finetune cache``: the stored features of frozen layers, and token ids of large tables."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import format_size, show_json, show_lines, show_table
from finetune.commands.options import chosen_options, debug_option, json_option, load

if TYPE_CHECKING:
    from finetune.model.tensor_store import TensorStore

EXAMPLES = """\b
Examples:
  finetune cache ls       the entries, the last used first
  finetune cache clear    delete all; the next run computes them again
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """List or delete stored features and token ids."""


@command.command(epilog=EXAMPLES)
@chosen_options("cache_dir")
@json_option
@debug_option
def ls(*, as_json: bool, **flags: Any) -> None:
    """List the entries, the last used first."""
    from finetune.tasks.tables import format_value

    store = _open_store(flags)
    entries = store.entries()
    if as_json:
        listed = [
            {**one.notes, "key": one.key, "size_bytes": one.size_bytes, "used_at": one.used_at}
            for one in entries
        ]
        show_json({"schema_version": 1, "folder": str(store.folder), "entries": listed})
        return
    if entries:
        names = ("rows", "data", "split", "model", "mode")
        rows = []
        for one in entries:
            used = f"{datetime.fromtimestamp(one.used_at):%Y-%m-%d %H:%M}"
            notes = (format_value(one.notes.get(name, "?")) for name in names)
            rows.append((used, format_size(one.size_bytes), *notes))
        show_table(("last used", "size", *names), rows, numbers=("size", "rows"))
    show_lines(f"{format_size(sum(one.size_bytes for one in entries))} in {store.folder}")


@command.command(epilog=EXAMPLES)
@chosen_options("cache_dir")
@json_option
@debug_option
def clear(*, as_json: bool, **flags: Any) -> None:
    """Delete all entries."""
    store = _open_store(flags)
    freed_bytes = store.clear()
    if as_json:
        show_json({"schema_version": 1, "folder": str(store.folder), "freed_bytes": freed_bytes})
    else:
        show_lines(f"deleted {format_size(freed_bytes)} in {store.folder}")


def _open_store(flags: dict[str, Any]) -> "TensorStore":
    from finetune.runs.cache import open_tensor_store

    return open_tensor_store(load(flags).config.cache)
