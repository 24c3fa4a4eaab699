"""``finetune cache``: shows the size of the files that runs share, or deletes them."""

from collections.abc import Mapping
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import format_size, show_lines

EXAMPLES = """\b
Examples:
  finetune cache          show the size
  finetune cache clear    delete everything; the next run recomputes it
"""


@click.command(epilog=EXAMPLES)
@click.argument("action", required=False, metavar="[clear]", type=click.Choice(["clear"]))
@flags.chosen_options("cache_dir")
@flags.with_json
def command(*, action: str | None, display: flags.Display, **options: Any) -> None:
    """Show the size of stored features, batch sizes and timings, or delete them."""
    from finetune.model.tensor_store import measured_files, open_tensor_store

    cache = flags.load(**options).config.cache
    store, measured = open_tensor_store(cache), measured_files(cache)
    stored = store.files()
    size_bytes = sum(file.stat().st_size for file in stored)
    if action:
        for file in (*stored, *measured):
            file.unlink(missing_ok=True)

    def show(facts: Mapping[str, Any]) -> None:
        deleted, size = "deleted " if action else "", format_size(size_bytes)
        show_lines(
            f"{deleted}{size} in {facts['folder']}: features of {facts['entries']:,} splits",
            f"{deleted}{len(measured):,} files with batch sizes and timings, next to that folder",
        )

    facts = {"folder": str(store.folder), "freed_bytes" if action else "size_bytes": size_bytes}
    display.show({**facts, "entries": len(stored), "measured_files": len(measured)}, show)
