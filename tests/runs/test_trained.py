"""The model of a finished run, loaded for use."""

import shutil
from pathlib import Path

import pytest
from prepared_runs import prepare_tiny, was_emitted
from tiny_training import OtherDevice

from finetune.errors import ConfigurationError
from finetune.events import Event, WarningMessage, sent_to
from finetune.files import read_json, write_json
from finetune.runs import trained
from finetune.runs.folder import RunFolder
from finetune.runs.trained import TrainedModel
from finetune.training import precision as precision_module


def copy_with_precision(run: Path, folder: Path, precision: str) -> Path:
    shutil.copytree(run, folder)
    file = folder / "model" / "inference.json"
    write_json(file, read_json(file) | {"precision": precision})
    return folder


@pytest.mark.parametrize("passed", [False, True])
def test_a_device_with_silent_faults_computes_in_16_bits_only_after_its_parity_check(
    passed: bool, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module, "has_parity", lambda *_, **__: passed)
    monkeypatch.setattr(trained, "select_device", lambda *_, **__: OtherDevice())
    run = RunFolder(copy_with_precision(finished_run, tmp_path / "run", "bf16"))
    model = TrainedModel.load(run, device="auto")
    assert model.predictor.precision == ("bf16" if passed else "fp32")


def test_bf16_on_a_cpu_without_instructions_is_refused(
    finished_run: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module.host, "bf16_instructions", lambda: "")
    with pytest.raises(ConfigurationError, match="bf16 is slow here"):
        prepare_tiny(tiny_folder, precision="bf16")
    prepare_tiny(tiny_folder, precision="bf16", check_device=False)
    run = RunFolder(copy_with_precision(finished_run, tmp_path / "run", "bf16"))
    emitted: list[Event] = []
    with sent_to(emitted.append):
        TrainedModel.load(run, device="cpu")
    assert was_emitted(emitted, WarningMessage, "using fp32 instead of bf16")
