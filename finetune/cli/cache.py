"""``finetune cache``: what frozen cores gave, kept for the next run."""

import os
from typing import TYPE_CHECKING, Any

import click

from finetune.cli.options import chosen_options, debug_option, given, json_option

if TYPE_CHECKING:
    from finetune.model.feature_store import FeatureStore

EXAMPLES = """\b
Examples:
  finetune cache ls          what is kept, the last used first
  finetune cache clear       delete all of it; the next run makes it anew
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Look at, or delete, what frozen cores gave for texts."""


@command.command()
@chosen_options("cache_dir")
@json_option
@debug_option
def ls(*, as_json: bool, **flags: Any) -> None:
    """List what is kept, the last used first."""
    from finetune.cli.console import show_json, show_kept

    store = _open_store(flags)
    entries = store.entries()
    if not as_json:
        show_kept(entries, folder=store.folder)
        return
    rows = [
        {**one.facts, "key": one.key, "size_bytes": one.size_bytes, "used_at": one.used_at}
        for one in entries
    ]
    show_json({"schema_version": 1, "folder": str(store.folder), "entries": rows})


@command.command()
@chosen_options("cache_dir")
@json_option
@debug_option
def clear(*, as_json: bool, **flags: Any) -> None:
    """Delete all that is kept."""
    from finetune.cli.console import show_json, show_lines, size_in_words

    store = _open_store(flags)
    freed_bytes = store.clear()
    if as_json:
        show_json({"schema_version": 1, "folder": str(store.folder), "freed_bytes": freed_bytes})
    else:
        show_lines(f"deleted {size_in_words(freed_bytes)} in {store.folder}")


def _open_store(flags: dict[str, Any]) -> "FeatureStore":
    from finetune.config.load import load_config
    from finetune.pipeline.features import open_feature_store

    loaded = load_config(file=None, environment=os.environ, flags=given(flags), assignments=())
    return open_feature_store(loaded.config.cache)
