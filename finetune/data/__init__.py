"""Labeled texts: reading them from any source, and splitting them."""

from pathlib import Path

# Prefix of temporary folders with a table in memory, until the run folder exists.
TEMPORARY = "finetune-table-"


def is_waiting(name: object) -> bool:
    """Return whether a file is the temporary copy of a table in memory."""
    return isinstance(name, str) and Path(name).parent.name.startswith(TEMPORARY)
