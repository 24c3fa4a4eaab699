"""``finetune cache``: features of frozen layers, token ids of large tables, and batch sizes."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import format_size, show_json, show_lines, show_table

if TYPE_CHECKING:
    from finetune.model.tensor_store import TensorStore

EXAMPLES = """\b
Examples:
  finetune cache ls       the entries, the last used first
  finetune cache clear    delete all; the next run computes them again
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """List or delete stored features, token ids, batch sizes and timings."""


@command.command(epilog=EXAMPLES)
@flags.chosen_options("cache_dir")
@flags.json_option
@flags.debug_option
def ls(*, as_json: bool, **options: Any) -> None:
    """List the entries, the last used first."""
    from finetune.tasks.tables import format_value

    store, measured = _open_store(options)
    entries, files = store.entries(), len(measured)
    if as_json:
        listed = [
            {**one.notes, "key": one.key, "size_bytes": one.size_bytes, "used_at": one.used_at}
            for one in entries
        ]
        folder = {"folder": str(store.folder), "measured_files": files}
        show_json({**folder, "entries": listed})
        return
    if entries:
        names = ("rows", "data", "split", "model", "mode")
        rows = []
        for one in entries:
            used = f"{datetime.fromtimestamp(one.used_at):%Y-%m-%d %H:%M}"
            notes = (format_value(one.notes.get(name, "?")) for name in names)
            rows.append((used, format_size(one.size_bytes), *notes))
        show_table(("last used", "size", *names), rows, numbers=("size", "rows"))
    size = format_size(sum(one.size_bytes for one in entries))
    show_lines(f"{size} in {store.folder}, {files} batch sizes and timings beside it")


@command.command(epilog=EXAMPLES)
@flags.chosen_options("cache_dir")
@flags.json_option
@flags.debug_option
def clear(*, as_json: bool, **options: Any) -> None:
    """Delete all entries."""
    store, measured = _open_store(options)
    freed_bytes = store.clear()
    for file in measured:
        file.unlink(missing_ok=True)
    if as_json:
        show_json({"folder": str(store.folder), "freed_bytes": freed_bytes})
    else:
        size = format_size(freed_bytes)
        show_lines(f"deleted {size} in {store.folder}, and {len(measured)} files beside it")


def _open_store(options: dict[str, Any]) -> "tuple[TensorStore, list[Path]]":
    from finetune.runs.cache import measured_files, open_tensor_store

    cache = flags.load(**options).config.cache
    return open_tensor_store(cache), measured_files(cache)
