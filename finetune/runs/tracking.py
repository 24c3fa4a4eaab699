"""Reports a run to an experiment tracker, such as TensorBoard, through Accelerate."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from finetune import distributed
from finetune.config.schema import Config
from finetune.distributed import RANK_VARIABLES
from finetune.errors import FinetuneError, UsageError
from finetune.events import Emit, Event, Step, Validation, WarningMessage
from finetune.runs.folder import RunFolder

NONE = "none"
_EXTRAS = {"tensorboard"}


def check_report_to(config: Config) -> None:
    """Raise ``UsageError`` if the package of the tracker is missing."""
    name = config.output.report_to
    if name != NONE and name not in map(str, get_available_trackers()):
        package = f"'finetune-mps[{name}]'" if name in _EXTRAS else name
        raise UsageError(
            f"to report to {name}, its package is needed", remedy=f"pip install {package}"
        )


@contextmanager
def tracked(config: Config, folder: RunFolder, *, emit: Emit) -> Iterator["Tracking"]:
    """Yield what reports to the configuration's tracker, if it names one.

    The tracker gets the options of model and training, and nothing of the data.
    """
    name = config.output.report_to
    if name == NONE:
        yield Tracking(name, None, emit)
        return
    with _accelerate_state(), _tracked(config, folder, name, emit=emit) as tracking:
        yield tracking


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """Give Accelerate's trackers the state that they read, unless the process has one.

    A state that a tracker makes itself reads the variables of an incomplete launch. On MPS it also
    lets missing operators run on the CPU in all processes that start later.
    """
    if PartialState._shared_state:
        yield
        return
    variables = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ |= variables
    try:
        yield
    finally:
        PartialState._reset_state()


@contextmanager
def _tracked(config: Config, folder: RunFolder, name: str, *, emit: Emit) -> Iterator["Tracking"]:
    tracker = None
    if distributed.is_main():
        options = {**asdict(config.model), **asdict(config.training)}
        options = {option: value for option, value in options.items() if value is not None}
        try:
            tracker = _make_tracker(name, folder.path.resolve())
            tracker.start()
            tracker.store_init_configuration(options)
        except Exception as error:  # each package has errors of its own
            raise FinetuneError(
                f"{name} can't be started: {_reason_of(error)}",
                remedy=f"look up how to use {name} in its documentation, or leave out --report-to",
            ) from error
    tracking = Tracking(name, tracker, emit)
    try:
        yield tracking
    finally:
        tracking.call("finish")


def _make_tracker(name: str, folder: Path) -> Any:
    """Return one of Accelerate's trackers, whose run has the name of the folder of ours."""
    tracker_type = LOGGER_TYPE_TO_CLASS[name]
    if tracker_type.requires_logging_directory:
        return tracker_type(name, folder)
    run_name = "run_name" if name == "mlflow" else "name"
    return tracker_type("finetune", **{run_name: folder.name})


def _reason_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Tracking:
    """An ``Emit`` that reports steps and validations to a tracker, if there is one."""

    def __init__(self, name: str, tracker: Any, emit: Emit) -> None:
        self._name, self._tracker, self._emit = name, tracker, emit

    def __call__(self, event: Event) -> None:
        """Report an event and pass it on."""
        self._emit(event)
        # The names under which the Trainer's callbacks report.
        if isinstance(event, Step):
            values = {"loss": event.loss, "learning_rate": event.learning_rate}
            self.report("train", values, step=event.step, epoch=event.epoch)
        elif isinstance(event, Validation):
            self.report("eval", event.metrics, step=event.step, epoch=event.epoch)

    def report(self, part: str, values: Mapping[str, float], *, step: int, epoch: float) -> None:
        """Report values of ``train``, ``eval`` or ``test``."""
        named = {f"{part}/{name}": value for name, value in values.items()}
        self.call("log", {**named, "train/epoch": epoch}, step=step)

    def call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call the tracker; go on without one that fails, whatever it raises, with a warning."""
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*arguments, **options)
        except Exception as error:
            self._tracker = None
            message = f"{self._name} failed, and gets no more of this run: {_reason_of(error)}"
            self._emit(WarningMessage(message, remedy="metrics.jsonl has all of it"))
