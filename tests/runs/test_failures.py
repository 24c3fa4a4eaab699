"""Remedies after a run is interrupted or runs out of memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.schema import Config, TrainingConfig
from finetune.devices.cpu import CpuDevice
from finetune.errors import BatchDoesNotFitError, InterruptionError
from finetune.runs.failures import failures_explained, interruption_explained
from finetune.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([], "run the command again, because nothing was saved yet"),
        (["config.yaml"], "run the command again with --overwrite, because nothing was saved yet"),
        (["config.yaml", "checkpoints/step-4/manifest.json"],
         "resume with: finetune run --resume-from-checkpoint "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", ["", "stopped after step 4 of 8"])
def test_an_interruption_names_what_to_do_next(
    words: str, files: list[str], remedy: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InterruptionError) as raised, interruption_explained(RunFolder(tmp_path)):
        raise KeyboardInterrupt(words)
    assert raised.value.message == (words or "stopped")
    assert raised.value.remedy.startswith(remedy)
    assert raised.value.remedy.endswith(str(tmp_path)) == (len(files) == 2)


def prepared(batch_size: Any) -> Any:
    config = replace(Config(), training=TrainingConfig(batch_size=batch_size))
    return SimpleNamespace(device=CpuDevice(), config=config)


@pytest.mark.parametrize("can_resume", [True, False])
@pytest.mark.parametrize(("batch_size", "smaller"), [(16, 8), (3, 1), (1, 1), ("auto", 1)])
def test_memory_that_ran_out_asks_for_half_the_batch(
    batch_size: Any, smaller: int, can_resume: bool, tmp_path: Path
) -> None:
    if can_resume:
        (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-4" / "manifest.json").touch()
        (tmp_path / "config.yaml").touch()
    folder = RunFolder(tmp_path)
    with (
        pytest.raises(BatchDoesNotFitError) as raised,
        failures_explained(folder, prepared(batch_size)),
    ):
        raise MemoryError
    assert f"--batch-size {smaller}" in raised.value.remedy
    assert ("--resume-from-checkpoint" in raised.value.remedy) == can_resume
