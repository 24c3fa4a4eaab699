"""Keeps the steps, validations and warnings of a run in its folder."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from finetune.events import Event, Step, Validation, WarningMessage, current_receiver
from finetune.files import append_jsonl, write_jsonl
from finetune.runs.folder import RunFolder

_NOT_KEPT = {"total_steps", "budget_bytes", "remaining_seconds"}


class Journal:
    """A receiver of events: steps and validations go to ``metrics.jsonl``, warnings next to it.

    Only the main process opens a folder. Earlier warnings are written when it is opened. Rows that
    can't be written, for example on a full disk, are written later.
    """

    def __init__(self, warnings: Sequence[dict[str, Any]] = ()) -> None:
        self._forward = current_receiver()
        self._folder: RunFolder | None = None
        self._metrics: list[dict[str, Any]] = []
        self._warnings = list(warnings)
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        """Keep an event and pass it on."""
        if isinstance(event, Step | Validation) and self._folder:
            self._metrics.append(_row(event))
            self.write()
        elif isinstance(event, WarningMessage):
            self._warnings.append(asdict(event))
            self.write()
        self._forward(event)

    def copy(self) -> "Journal":
        """Return a journal for another run, starting with the warnings so far."""
        return Journal(self._warnings)

    def open(self, folder: RunFolder) -> None:
        """Write to a run folder from now on."""
        self._folder = folder
        self.write()

    def close(self) -> None:
        """Stop writing, because the run has finished."""
        self._folder = None

    def write(self) -> bool:
        """Write pending rows; return whether all are written."""
        if self._folder is None:
            return False
        file = self._folder.metrics_file
        try:
            append_jsonl(file, self._metrics)
            self._metrics.clear()
            if self._warnings:
                file = self._folder.warnings_file
                append_jsonl(file, self._warnings)
                self._warnings.clear()
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"{file} can't be written: {error.strerror}"
                remedy = "the run continues and tries again; it writes no checkpoint until then"
                self(WarningMessage(message, remedy=remedy))
        return not self._has_warned


def _row(event: Step | Validation) -> dict[str, Any]:
    if isinstance(event, Validation):
        metrics = {f"eval_{name}": value for name, value in event.metrics.items()}
        return {"kind": "validation", "step": event.step, "epoch": event.epoch, **metrics}
    kept = {name: value for name, value in vars(event).items() if name not in _NOT_KEPT}
    return {"kind": "step", **kept}


def continue_journal(folder: RunFolder, *, steps: int) -> None:
    """Drop rows after the step that a run resumes from, and incomplete lines."""
    rows = []
    for line in folder.metrics_file.read_bytes().split(b"\n"):
        with suppress(ValueError, LookupError, TypeError):
            row = json.loads(line)
            rows += [row] if row["step"] <= steps else []
    write_jsonl(folder.metrics_file, rows)


def read_warnings(folder: RunFolder) -> Sequence[WarningMessage]:
    """Return the warnings of a run, each once: a resumed run repeats some."""
    if not folder.warnings_file.exists():
        return ()
    rows = folder.read(folder.warnings_file, TypeAdapter(list[WarningMessage]).validate_python)
    return [*dict.fromkeys(rows)]
