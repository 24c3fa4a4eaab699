"""Keeps the steps, validations and warnings of a run in its folder."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from finetune.events import Emit, Event, Step, Validation, WarningMessage
from finetune.files import append_jsonl, write_jsonl
from finetune.runs.folder import RunFolder

STEP_FIELDS = (
    *("step", "epoch", "loss", "learning_rate"),
    *("examples_per_second", "memory_bytes", "held_bytes"),
)


class Journal:
    """An ``Emit`` that appends steps and validations to ``metrics.jsonl``.

    Rows that can't be written, on a full disk for example, are written with a later one.
    """

    def __init__(self, folder: RunFolder, emit: Emit) -> None:
        self._file, self._emit = folder.metrics_file, emit
        self._unwritten: list[dict[str, Any]] = []
        self._has_warned = False

    def __call__(self, event: Event) -> None:
        """Keep an event and pass it on."""
        if isinstance(event, Step | Validation):
            self._unwritten.append(_row(event))
            self.write()
        self._emit(event)

    def write(self) -> bool:
        """Write the rows that are still to write; return whether all are written."""
        try:
            append_jsonl(self._file, self._unwritten)
        except OSError as error:
            if not self._has_warned:
                message = f"{self._file} can't be written: {error.strerror}"
                remedy = "the run goes on and tries again; it writes no checkpoint until then"
                self._emit(WarningMessage(message, remedy=remedy))
        else:
            self._unwritten.clear()
        self._has_warned = bool(self._unwritten)
        return not self._unwritten


def _row(event: Step | Validation) -> dict[str, Any]:
    if isinstance(event, Validation):
        metrics = {f"eval_{name}": value for name, value in event.metrics.items()}
        return {"kind": "validation", "step": event.step, "epoch": event.epoch, **metrics}
    return {"kind": "step", **{name: getattr(event, name) for name in STEP_FIELDS}}


def continue_journal(folder: RunFolder, *, steps: int) -> None:
    """Drop the rows after the step that a run resumes from, and what a power cut has torn."""
    rows = []
    for line in folder.metrics_file.read_bytes().split(b"\n"):
        with suppress(ValueError, LookupError, TypeError):
            row = json.loads(line)
            rows += [row] if row["step"] <= steps else []
    write_jsonl(folder.metrics_file, rows)


class WarningLog:
    """An ``Emit`` that keeps the warnings of a run for its report."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._unwritten: list[dict[str, Any]] = []
        self._folder: RunFolder | None = None

    def __call__(self, event: Event) -> None:
        """Keep a warning, and pass on all events."""
        if isinstance(event, WarningMessage):
            self._unwritten.append(asdict(event))
            self._write()
        self._emit(event)

    def copy(self) -> "WarningLog":
        """Return a log of another run, which begins with the warnings not yet written."""
        log = WarningLog(self._emit)
        log._unwritten += self._unwritten
        return log

    def write_to(self, folder: RunFolder) -> None:
        """Write the warnings so far, and those to come, to a run folder."""
        self._folder = folder
        self._write()

    def _write(self) -> None:
        # On a full disk, of which the journal warns, they are written with a later one.
        if self._folder and self._unwritten:
            with suppress(OSError):
                append_jsonl(self._folder.warnings_file, self._unwritten)
                self._unwritten.clear()


def read_warnings(folder: RunFolder) -> Sequence[WarningMessage]:
    """Return the warnings of a run, each once: a resumed run repeats some."""
    if not folder.warnings_file.exists():
        return ()
    rows = folder.read(folder.warnings_file, lambda rows: [WarningMessage(**row) for row in rows])
    return [*dict.fromkeys(rows)]
