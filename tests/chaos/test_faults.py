"""Faults of disk and process at each step in which the checkpoints of a run are written."""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import tiny_training_state

from finetune.errors import CheckpointDamaged
from finetune.events import Event, WarningMessage
from finetune.files import write_json
from finetune.runs import checkpoint
from finetune.runs.checkpoint import Checkpoints, read_checkpoint
from finetune.runs.folder import RunFolder
from finetune.training.snapshot import Progress
from finetune.training.step import TrainingState

CALLS = [(os, "mkdir"), (os, "fsync"), (os, "replace"), (checkpoint, "save_file"),
         (Path, "write_text"), (Path, "chmod"), (shutil, "rmtree")]  # fmt: skip
STEPS = (1, 2, 3)


class Faults:
    """Lets the call of a number, counted over all functions, go wrong."""

    def __init__(self, at: int, act: Callable[[], None], *, tears: bool) -> None:
        self.at, self.act, self.tears, self.count = at, act, tears, 0

    def plant(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count - 1 != self.at:
                return original(*arguments, **options)
            if self.tears:
                with suppress(OSError):
                    original(*arguments, **options)
                self._tear(name, arguments)
            try:
                self.act()
            except OSError:
                if not options.get("ignore_errors"):
                    raise

        monkeypatch.setattr(owner, name, call)

    def _tear(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Leave half of a file, as a full disk and a power cut do."""
        if name in ("save_file", "write_text"):
            file = Path(arguments[1] if name == "save_file" else arguments[0])
            os.truncate(file, file.stat().st_size // 2)


def fail(error_number: int) -> None:
    raise OSError(error_number, os.strerror(error_number))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(work: Callable[[], None]) -> int:
    """Do some work in a forked process and return its status."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def save_step(run: Path, step: int, training_state: TrainingState) -> list[Event]:
    """Save a model whose parameters all have the number of a step, and return the warnings."""
    with torch.no_grad():
        for parameter in training_state.trained_parameters().values():
            parameter.fill_(step)
    # The third is worse than the second.
    best_step = 2 if step == 3 else step
    progress, emitted = Progress(steps=step, best_step=best_step), list[Event]()
    checkpoints = Checkpoints(
        RunFolder(run), keep=2, device=training_state.device, emit=emitted.append
    )
    if best_step == step:
        checkpoints.save_best(training_state, progress)
    checkpoints.save(training_state, progress)
    return emitted


@pytest.fixture(scope="module")
def training_state() -> TrainingState:
    return tiny_training_state(mode="classifier")


@pytest.fixture
def saved_run(training_state: TrainingState, tmp_path: Path) -> Path:
    """A run with checkpoints of three steps, of which two are kept."""
    run = tmp_path / "saved"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    write_json(run / "manifest.json", {"tool": "finetune", "kind": "run"})
    for step in STEPS:
        assert save_step(run, step, training_state) == []
    return run


def assert_nothing_is_lost(run: Path, training_state: TrainingState) -> None:
    """Read all that verifies, resume from it, and save once more."""
    folder, emitted, intact = RunFolder(run), list[Event](), list[str]()
    for path in run.glob("checkpoints/*"):
        with suppress(CheckpointDamaged):
            tensors, state = read_checkpoint(path)
            step = state.get("steps") or state["progress"]["steps"]
            assert all((one == step).all() for one in tensors["model"].values())
            intact.append(path.name)
    newest = max(int(name[5:]) for name in intact if name in ("step-3", "step-4"))
    assert f"best-{2 if newest == 3 else 4}" in intact
    checkpoints = Checkpoints(folder, keep=2, device=training_state.device, emit=emitted.append)
    assert checkpoints.restore(training_state).steps in (3, 4)
    assert not emitted
    assert save_step(run, 5, training_state) == []
    steps = sorted(int(path.name[5:]) for path in folder.checkpoints_folder.glob("step-*"))
    assert len(steps) == 2
    assert steps[1] == 5
    bests = {int(path.name[5:]) for path in folder.checkpoints_folder.glob("best-*")}
    assert 5 in bests <= {2, 4, 5}
    assert len([*folder.checkpoints_folder.iterdir()]) == len(steps) + len(bests)


@pytest.mark.parametrize(
    ("error_number", "tears"),
    [
        (errno.ENOSPC, False),
        pytest.param(errno.EIO, True, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
def test_no_checkpoint_that_verifies_is_wrong(
    error_number: int | None, tears: bool, saved_run: Path, training_state: TrainingState
) -> None:
    """Without an error number the process is killed; a call that tears was done, or half of it."""
    at, ended = 0, False
    while not ended:
        run = shutil.copytree(saved_run, saved_run.with_name(str(at)))
        act = kill if error_number is None else lambda: fail(error_number)
        faults = Faults(at, act, tears=tears)
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in CALLS:
                faults.plant(owner, name, patch)
            if error_number is None:
                ended = in_a_child(lambda run=run: save_step(run, 4, training_state)) == 0
            else:
                save_step(run, 4, training_state)
                ended = faults.count <= at
        assert_nothing_is_lost(run, training_state)
        at += 1
    assert at > 30


@pytest.mark.parametrize("kills", [True, False])
def test_a_disk_that_is_full_after_any_byte_loses_nothing(
    kills: bool, saved_run: Path, training_state: TrainingState
) -> None:
    """The kernel refuses what would make a file longer, or kills the process at that write."""
    written = saved_run.glob("checkpoints/step-3/*")
    longest_bytes = max(file.stat().st_size for file in written)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        [warning] = save_step(run, 4, training_state)
        assert isinstance(warning, WarningMessage)

    for limit_bytes in range(0, longest_bytes, longest_bytes // 6):
        run = shutil.copytree(saved_run, saved_run.with_name(str(limit_bytes)))
        assert in_a_child(work) == (signal.SIGXFSZ if kills else 0)
        assert_nothing_is_lost(run, training_state)
