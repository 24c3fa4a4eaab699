"""Receivers of run events: the journal on disk, and an experiment tracker."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from finetune import distributed
from finetune.config.schema import Config
from finetune.errors import FinetuneError, UsageError
from finetune.events import Event, Step, Validation, WarningMessage, current_receiver, emit
from finetune.files import append_jsonl, read_bytes, write_jsonl
from finetune.runs.folder import RunFolder

_NOT_KEPT = {"total_steps", "budget_bytes", "remaining_seconds"}


class Journal:
    """Receives events: writes steps and validations to ``metrics.jsonl``, warnings next to it.

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
        if isinstance(event, Step) and self._folder:
            kept = {name: value for name, value in vars(event).items() if name not in _NOT_KEPT}
            self._metrics.append({"kind": "step", **kept})
        elif isinstance(event, Validation) and self._folder:
            metrics = {f"eval_{name}": value for name, value in event.metrics.items()}
            row = {"kind": "validation", "step": event.step, "epoch": event.epoch, **metrics}
            self._metrics.append(row)
        elif isinstance(event, WarningMessage):
            self._warnings.append(asdict(event))
        if isinstance(event, Step | Validation | WarningMessage):
            self.write()
        self._forward(event)

    def copy(self) -> "Journal":
        """Return a journal for another run, starting with the warnings so far."""
        return Journal(self._warnings)

    def open(self, folder: RunFolder | None) -> None:
        """Write to a run folder from now on, or stop writing if it is None."""
        self._folder = folder
        self.write()

    def write(self) -> bool:
        """Write pending rows. Return whether all are written."""
        if self._folder is None:
            return False
        try:
            append_jsonl(self._folder.metrics_file, self._metrics)
            self._metrics.clear()
            if self._warnings:
                append_jsonl(self._folder.warnings_file, self._warnings)
                self._warnings.clear()
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"{error.filename} can't be written: {error.strerror}"
                remedy = (
                    "free disk space; the run continues, and retries before it writes a checkpoint"
                )
                self(WarningMessage(message, remedy=remedy))
        return not self._has_warned


def continue_journal(folder: RunFolder, *, steps: int) -> None:
    """Drop rows after the step that a run resumes from, and incomplete lines."""
    rows = []
    for line in read_bytes(folder.metrics_file).split(b"\n"):
        with suppress(ValueError, LookupError, TypeError):
            row = json.loads(line)
            rows += [row] if row["step"] <= steps else []
    write_jsonl(folder.metrics_file, rows)


def read_warnings(folder: RunFolder) -> Sequence[WarningMessage]:
    """Return the distinct warnings of a run. A resumed run repeats some."""
    if not folder.warnings_file.exists():
        return ()
    rows = folder.read(folder.warnings_file, TypeAdapter(list[WarningMessage]).validate_python)
    return [*dict.fromkeys(rows)]


class Tracker:
    """Receives events: reports steps and validations to an Accelerate tracker."""

    def __init__(self, name: str, tracker: Any) -> None:
        self.name, self._tracker, self._forward = name, tracker, current_receiver()

    def __call__(self, event: Event) -> None:
        """Pass an event on, and report it with Trainer metric names."""
        self._forward(event)
        if isinstance(event, Step):
            values = {"loss": event.loss, "learning_rate": event.learning_rate}
            self.report("train", values, step=event.step, epoch=event.epoch)
        elif isinstance(event, Validation):
            self.report("eval", event.metrics, step=event.step, epoch=event.epoch)

    def report(self, part: str, values: Mapping[str, float], *, step: int, epoch: float) -> None:
        """Report values of ``train``, ``eval`` or ``test``."""
        full_names = {f"{part}/{name}": value for name, value in values.items()}
        self.call("log", {**full_names, "train/epoch": epoch}, step=step)

    def call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call the tracker, if any. If it fails, continue without it."""
        try:
            if self._tracker is not None:
                getattr(self._tracker, method)(*arguments, **options)
        except Exception as error:  # trackers raise different exceptions
            self._tracker = None
            message = f"{self.name} failed and gets no more reports: {_reason_of(error)}"
            emit(WarningMessage(message, remedy="see metrics.jsonl for all metrics"))


def check_report_to(config: Config) -> None:
    """Raise ``UsageError`` if the package of the tracker is missing."""
    name = config.output.report_to
    if name == "none":
        return
    from accelerate.tracking import get_available_trackers

    if name not in map(str, get_available_trackers()):
        raise UsageError(f"{name} is not installed", remedy=f"pip install {name}")


@contextmanager
def tracked(config: Config, folder: RunFolder) -> Iterator[Tracker]:
    """Yield a receiver that reports to the configured tracker, if any."""
    name = config.output.report_to
    if name == "none" or not distributed.is_main():
        yield Tracker(name, None)
        return
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # Trackers read the state of Accelerate, and the state reads the ranks.
    is_ours = not PartialState._shared_state
    ranks = {name: os.environ[name] for name in distributed.RANK_VARIABLES if name in os.environ}
    if is_ours:
        for variable in ranks:
            del os.environ[variable]
        try:
            PartialState(cpu=True)
        finally:
            os.environ |= ranks
    # The tracker gets the model and training options, but no data.
    kind, path = LOGGER_TYPE_TO_CLASS[name], folder.path.resolve()
    options = {**asdict(config.model), **asdict(config.training)}
    options = {option: value for option, value in options.items() if value is not None}
    run_name = {"run_name" if name == "mlflow" else "name": path.name}
    with ExitStack() as stack:
        if is_ours:
            stack.callback(PartialState._reset_state)
        try:
            has_folder = kind.requires_logging_directory
            tracker = kind(name, path) if has_folder else kind("finetune", **run_name)
            tracker.start()
            tracker.store_init_configuration(options)
        except Exception as error:
            raise FinetuneError(
                f"{name} can't be started: {_reason_of(error)}",
                remedy=f"see the documentation of {name}, or drop --report-to",
            ) from error
        receiver = Tracker(name, tracker)
        stack.callback(receiver.call, "finish")
        yield receiver


def _reason_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
