"""Labeled texts: reading them from any source, and splitting them."""

from pathlib import Path

# Prefix of temporary folders with a table in memory, until the run folder exists.
TEMPORARY = "finetune-table-"


def is_waiting(name: object) -> bool:
    """Return whether a name belongs to a table in memory, of which a run keeps a copy."""
    return isinstance(name, str) and Path(name).parent.name.startswith(TEMPORARY)
