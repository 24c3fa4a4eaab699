"""Signals in each stage of a run: exit codes, remedies and complete files."""

import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Command, flags, unfinished_files

import finetune
from finetune.runs.folder import RunFolder

STAGES = {
    "loading": "finetune.runs.prepare.load_pretrained",
    "encoding": "finetune.model.load.encode_texts",
    "frozen pass": "finetune.runs.features.plan_evaluation",
    "first step": "finetune.training.trainer.Trainer.step",
    "validation": "finetune.tasks.base.compute_metrics",
    "saving": "finetune.runs.checkpoint.save_file",
    "final model": "finetune.runs.run.save_model",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
# All signals in stages that defer them, and one signal in other stages.
CASES = [
    (stage, number)
    for turn, stage in enumerate(STAGES)
    for number in (SIGNALS if stage == "first step" else (SIGNALS[turn % 3],))
]


def send_at(
    stage: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, *, times: int = 1
) -> None:
    """Send signals to this process when a stage of a run starts for the first time."""
    module_name, _, name = STAGES[stage].rpartition(".")
    module = pkgutil.resolve_name(module_name)
    original: Callable[..., Any] = getattr(module, name)

    def send(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, name, original)
        for _ in range(times):
            signal.raise_signal(number)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, send)


@pytest.mark.parametrize(("stage", "number"), CASES)
def test_signal_in_each_stage_has_its_exit_code_and_a_remedy(
    stage: str,
    number: signal.Signals,
    command: Command,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    options = [*flags(max_train_samples=32), "--cache-dir", str(tmp_path / "cache")]
    mode = ["--freeze-core"] if stage == "frozen pass" else []
    send_at(stage, number, monkeypatch)
    stopped = command("run", "--model", tiny_folder, "--output-dir", run, *options, *mode)
    if stage in ("loading", "encoding", "frozen pass"):
        stopped.assert_rejected(CODES[number], "nothing was saved yet")
        assert not run.exists()
        return
    stopped.assert_rejected(CODES[number], f"finetune run --resume-from-checkpoint {run}")
    if stage == "first step":
        assert "stopped after step 1 of 4" in stopped.errors
    assert RunFolder(run).can_resume
    assert unfinished_files(run) == []


def test_run_can_resume_after_a_second_signal_during_a_checkpoint(
    command: Command, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    arguments = ("run", "--model", tiny_folder, "--output-dir", run, *flags(max_train_samples=32))
    send_at("validation", signal.SIGTERM, monkeypatch)
    command(*arguments).assert_rejected(143, "stopped after step 2 of 4")
    send_at("saving", signal.SIGHUP, monkeypatch, times=2)
    saves = ("--save-strategy=steps", "--save-steps=1")
    command("run", "--resume-from-checkpoint", run, *saves).assert_rejected(129, str(run))
    finetune.run(resume_from_checkpoint=run)
    assert unfinished_files(run) == []
