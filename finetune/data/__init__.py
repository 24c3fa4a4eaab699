"""Labelled texts: where they come from, and how they are split."""

from pathlib import Path

# In a folder whose name begins so a table in memory waits for the folder of its run.
TEMPORARY = "finetune-table-"


def is_waiting(name: object) -> bool:
    """Return whether a name belongs to a table in memory, of which a run keeps a copy."""
    return isinstance(name, str) and Path(name).parent.name.startswith(TEMPORARY)
