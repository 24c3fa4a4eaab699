"""Keeps what a run tells in its folder."""

from typing import Any

from finetune.events import Event, Tell, Update, Validation
from finetune.runs.folder import RunFolder, append_jsonl, read_jsonl, write_jsonl


def journal(folder: RunFolder, tell: Tell) -> Tell:
    """Return a ``Tell`` that keeps what it is told in ``metrics.jsonl`` and passes it on."""

    def tell_and_keep(event: Event) -> None:
        row = _row(event)
        if row is not None:
            append_jsonl(folder.metrics_file, row)
        tell(event)

    return tell_and_keep


def continue_journal(folder: RunFolder, *, updates: int) -> None:
    """Drop what was written after the update that a run goes on from."""
    if folder.metrics_file.exists():
        rows = read_jsonl(folder.metrics_file)
        write_jsonl(folder.metrics_file, (row for row in rows if row["update"] <= updates))


def _row(event: Event) -> dict[str, Any] | None:
    if isinstance(event, Update):
        return {
            "kind": "update",
            "update": event.update,
            "epoch": event.epoch,
            "loss": event.loss,
            "learning_rate": event.learning_rate,
            "examples_per_second": event.examples_per_second,
            "memory_bytes": event.memory_bytes,
            "held_bytes": event.held_bytes,
        }
    if isinstance(event, Validation):
        figures = {f"eval_{name}": value for name, value in event.metrics.items()}
        return {"kind": "validation", "update": event.update, "epoch": event.epoch, **figures}
    return None
