"""Reads labeled texts from any source, and splits them."""

from pathlib import Path

# Prefix of temporary folders for in-memory tables, until the run folder exists.
TEMPORARY = "finetune-table-"


def is_waiting(name: object) -> bool:
    """Return whether a file is the temporary copy of an in-memory table."""
    return isinstance(name, str) and Path(name).parent.name.startswith(TEMPORARY)
