"""The journal of a run, and experiment trackers."""

import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tiny_runs import Command, flags

from finetune.config.schema import Config, ModelConfig, OutputConfig
from finetune.events import Event, Info, Step, Validation, WarningMessage, sent_to
from finetune.files import read_json, read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal, read_warnings, tracked

STEP = Step(
    step=4, total_steps=8, epoch=0.5, loss=1.5, learning_rate=1e-3, examples_per_second=1.0,
    memory_bytes=1, reserved_bytes=1, remaining_seconds=1.0, budget_bytes=1,
)  # fmt: skip
VALIDATION = Validation(4, 0.5, {"accuracy": 0.75, "loss": 1.25}, is_best=True)


def fake(name: str, *, fails_at: str = "") -> tuple[type, list[Any]]:
    """Return an Accelerate tracker without its package, and a list of its calls."""
    calls: list[Any] = []

    def method(called: str) -> Any:
        def note(self: Any, *values: Any, step: int | None = None) -> None:
            if called == fails_at:
                raise ConnectionError("no answer\nfrom the server")
            calls.append((called, vars(self), *values, step))

        return note

    names = ("start", "store_init_configuration", "log", "finish")
    methods = {called: method(called) for called in names}
    return type(f"Fake{name}", (LOGGER_TYPE_TO_CLASS[name],), methods), calls


def report(name: str, folder: Path) -> list[Event]:
    """Report three events and the test metrics to a tracker, and return the events passed on."""
    config = Config(model=ModelConfig("tiny"), output=OutputConfig(report_to=name))  # type: ignore[arg-type]
    passed_on: list[Event] = []
    with sent_to(passed_on.append), tracked(config, RunFolder(folder)) as emit:
        for event in (STEP, VALIDATION, STEP):
            emit(event)
        emit.report("test", {"accuracy": 0.5}, step=8, epoch=1.0)
    return passed_on


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("wandb", {"run_name": "finetune", "init_kwargs": {"name": "trec"}}),
        ("trackio", {"run_name": "finetune", "init_kwargs": {"name": "trec"}}),
        ("mlflow", {"experiment_name": "finetune", "run_name": "trec"}),
    ],
)
def test_tracker_gets_the_same_names_and_metrics_as_from_trainer(
    name: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = fake(name)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
    assert report(name, Path("runs/trec")) == [STEP, VALIDATION, STEP]
    (_, attributes, _), (_, _, options, _), *logged, finished = calls
    assert attributes.items() >= names.items()
    assert (options["model"], options["seed"]) == ("tiny", 42)
    assert "data" not in options
    assert all(isinstance(value, bool | int | float | str) for value in options.values())
    step = {"train/loss": 1.5, "train/learning_rate": 1e-3, "train/epoch": 0.5}
    validation = {"eval/accuracy": 0.75, "eval/loss": 1.25, "train/epoch": 0.5}
    test = {"test/accuracy": 0.5, "train/epoch": 1.0}
    reports = [(number, values) for _, _, values, number in logged]
    assert reports == [(4, step), (4, validation), (4, step), (8, test)]
    assert finished[0] == "finish"


@pytest.mark.parametrize(("fails_at", "logged"), [("log", 0), ("finish", 4)])
def test_failing_tracker_is_disabled_with_one_warning(
    fails_at: str, logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = fake("wandb", fails_at=fails_at)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", kind)
    passed_on = report("wandb", Path("runs/trec"))
    (warning,) = [event for event in passed_on if isinstance(event, WarningMessage)]
    assert "wandb failed" in warning.message
    assert "no answer from the server" in warning.message
    assert passed_on.count(STEP) == 2
    assert [call[0] for call in calls[2:]] == ["log"] * logged


def test_missing_tracker_package_is_reported_before_loading(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate_tracking, "_available_trackers", [])
    wanted = ["--report-to", "trackio", "--model", "none", "--output-dir", tmp_path / "r"]
    command("run", *flags(), *wanted).assert_rejected(2, "pip install trackio")
    assert not (tmp_path / "r").exists()


def test_tensorboard_events_are_written_to_the_run_folder(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs the extra tensorboard",
    )
    run = tmp_path / "run"
    wanted = ["--report-to", "tensorboard", "--model", tiny_folder, "--output-dir", run]
    done = command("run", *flags(num_train_epochs=1), *wanted)
    assert done.code == 0, done.errors
    (events,) = (run / "tensorboard").glob("events.*")
    found = accumulators.EventAccumulator(str(events)).Reload()
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "step"]
    losses = [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    [tested] = found.Scalars("test/accuracy")
    results = read_json(run / "all_results.json")
    assert (tested.step, tested.value) == (4, pytest.approx(results["test_accuracy"]))
    RunFolder(run).check()


@pytest.mark.parametrize("own", [False, True])
def test_tracker_keeps_the_environment_and_the_accelerator_of_the_user(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    accelerate.PartialState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True) if own else None
    # As after an incomplete launch.
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = dict(os.environ)
    report("tensorboard", tmp_path)
    assert list(tmp_path.rglob("events.out.tfevents*"))
    assert dict(os.environ) == before
    assert bool(accelerate.PartialState._shared_state) == own
    assert accelerator is None or accelerator.is_main_process
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_full_disk_does_not_leave_incomplete_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    emit = Journal()
    emit.open(folder)
    emit(replace(STEP, step=1))
    size = folder.metrics_file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        emit(replace(STEP, step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.metrics_file.stat().st_size == size
    emit(replace(STEP, step=3))
    assert [row["step"] for row in read_jsonl(folder.metrics_file)] == [1, 2, 3]


def test_warnings_before_and_after_folder_creation_are_saved_once(tmp_path: Path) -> None:
    folder, emitted = RunFolder(tmp_path), list[Event]()
    early, late = WarningMessage("some texts are cut", remedy="read all"), WarningMessage("slow")
    with sent_to(emitted.append):
        journal = Journal()
    journal(early)
    assert read_warnings(folder) == ()
    copied_journal = journal.copy()
    journal.open(folder)
    for event in (Info("training"), late, early):
        journal(event)
    assert emitted == [early, Info("training"), late, early]
    assert read_warnings(folder) == [early, late]
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    copied_journal.open(other)
    assert read_warnings(other) == [early]
