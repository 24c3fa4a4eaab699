"""Checkpoints during a run, and full disks."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import begin_run, prepare_tiny
from safetensors import SafetensorError
from tiny_runs import at, have_same_bits, run_tiny, weights_of
from transformers import PreTrainedModel

import finetune
from finetune.devices.cpu import CpuDevice
from finetune.errors import FinetuneError, UsageError
from finetune.events import Event, Step, WarningMessage
from finetune.runs import checkpoint
from finetune.runs.checkpoint import Checkpoints
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal

EVERY_THIRD: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Two epochs of four steps without interruption. Tests don't change it."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    run_tiny(run, model=tiny_folder, **EVERY_THIRD)
    return run


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    ("failing_calls", "error"),
    [({0}, OSError(errno.ENOSPC, FULL)), ({0, 1}, SafetensorError("I/O error (os error 28)"))],
)
def test_full_disk_during_checkpoints_only_causes_warnings(
    failing_calls: set[int],
    error: Exception,
    whole_run: Path,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, emitted, calls = tmp_path / "run", list[Event](), iter(range(1000))
    save_file = checkpoint.save_file

    def save_or_fail(*arguments: Any) -> None:
        if next(calls) in failing_calls:
            raise error
        save_file(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", save_or_fail)
    run_tiny(run, model=tiny_folder, emit=emitted.append, **EVERY_THIRD)
    assert have_same_bits(weights_of(run), weights_of(whole_run))
    warnings = [event.message for event in emitted if isinstance(event, WarningMessage)]
    assert sum(f"can't be written: {FULL}" in warning for warning in warnings) == len(failing_calls)


def test_final_model_can_be_saved_later_if_the_disk_is_full(
    whole_run: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(FinetuneError, match="No space left") as raised:
        run_tiny(run, model=tiny_folder)
    assert f"--resume-from-checkpoint {run}" in raised.value.remedy
    monkeypatch.undo()
    finetune.run(resume_from_checkpoint=run)
    assert have_same_bits(weights_of(run), weights_of(whole_run))


def test_overwrite_deletes_the_old_run_only_when_training_starts(
    whole_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    before = sorted(run.rglob("*"))
    with pytest.raises(UsageError):
        run_tiny(run, model=tmp_path / "none", overwrite=True)
    assert sorted(run.rglob("*")) == before
    with pytest.raises(ZeroDivisionError):
        run_tiny(run, model=tiny_folder, overwrite=True, emit=at(Step, 1, lambda: 1 / 0))
    assert not (run / "model").exists()


def test_checkpoints_take_a_small_fraction_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    for seconds_of_one, seconds in ((0.0, 30.0), (6.0, 200.0)):
        monkeypatch.setattr(checkpoint, "EXPECTED_SECONDS", seconds_of_one)
        now[0] = 0.0
        checkpoints = Checkpoints(
            RunFolder(tmp_path), keep=1, device=CpuDevice(), journal=Journal()
        )
        now[0] = seconds - 1
        assert not checkpoints.is_due()
        now[0] = seconds + 1
        assert checkpoints.is_due()


def test_checkpoint_includes_the_best_model_if_it_is_not_the_last(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs = prepare_tiny(tiny_folder, max_steps=4)
    with begin_run(inputs, tmp_path / "run") as run:
        trainer = run.trainer
        parameter = next(iter(trainer.trained_parameters().values()))
        best = parameter.detach().clone()
        run.checkpoints.save_best(trainer)
        trainer.progress.steps = 1
        with torch.no_grad():
            parameter += 1
        newer = tmp_path / "run" / "checkpoints" / "step-9" / "manifest.json"  # a damaged one
        newer.parent.mkdir(parents=True)
        newer.touch()
        run.checkpoints.save(trainer)
        assert [path.name for path in run.folder.checkpoints] == ["step-1"]
        resumed = Checkpoints(run.folder, keep=1, device=CpuDevice(), journal=run.journal)
        resumed.restore(trainer)
        assert not parameter.equal(best)
        resumed.load_best(trainer)
        assert parameter.equal(best)
