"""Reports a run to an experiment tracker, such as TensorBoard, through Accelerate."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from finetune import distributed
from finetune.config.schema import Config
from finetune.errors import FinetuneError, UsageError
from finetune.events import Event, Step, Validation, WarningMessage, current_receiver, emit
from finetune.runs.folder import RunFolder


def check_report_to(config: Config) -> None:
    """Raise ``UsageError`` if the package of the tracker is missing."""
    name = config.output.report_to
    if name != "none" and name not in map(str, get_available_trackers()):
        raise UsageError(f"{name} is not installed", remedy=f"pip install {name}")


class Tracking:
    """A receiver of events that reports steps and validations to a tracker, if there is one."""

    def __init__(self, name: str) -> None:
        self.name, self._forward = name, current_receiver()
        self.tracker: Any = None

    def start(self, config: Config, folder: RunFolder) -> None:
        """Start the tracker. It gets the options of model and training, and no data."""
        kind, path = LOGGER_TYPE_TO_CLASS[self.name], folder.path.resolve()
        options = {**asdict(config.model), **asdict(config.training)}
        run_name = {"run_name" if self.name == "mlflow" else "name": path.name}
        has_folder = kind.requires_logging_directory
        self.tracker = kind(self.name, path) if has_folder else kind("finetune", **run_name)
        self.tracker.start()
        set_options = {name: value for name, value in options.items() if value is not None}
        self.tracker.store_init_configuration(set_options)

    def __call__(self, event: Event) -> None:
        """Pass an event on, and report it with the metric names of the Trainer."""
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
        """Call the tracker. If it fails, the run continues without it."""
        try:
            if self.tracker is not None:
                getattr(self.tracker, method)(*arguments, **options)
        except Exception as error:  # each tracker raises different exceptions
            self.tracker = None
            message = f"{self.name} failed and gets no more reports: {_reason_of(error)}"
            emit(WarningMessage(message, remedy="see metrics.jsonl for all metrics"))


@contextmanager
def tracked(config: Config, folder: RunFolder) -> Iterator[Tracking]:
    """Yield a receiver that reports to the tracker of a configuration, if there is one."""
    tracking = Tracking(config.output.report_to)
    if tracking.name == "none" or not distributed.is_main():
        yield tracking
        return
    with _accelerate_state():
        try:
            tracking.start(config, folder)
        except Exception as error:
            raise FinetuneError(
                f"{tracking.name} can't be started: {_reason_of(error)}",
                remedy=f"see the documentation of {tracking.name}, or drop --report-to",
            ) from error
        try:
            yield tracking
        finally:
            tracking.call("finish")


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """Set the state that trackers of Accelerate read, without changing the environment."""
    if PartialState._shared_state:
        yield
        return
    names = distributed.RANK_VARIABLES
    variables = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ |= variables
    try:
        yield
    finally:
        PartialState._reset_state()


def _reason_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
