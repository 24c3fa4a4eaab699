"""The model of a finished run, loaded to be used."""

import shutil
from pathlib import Path

import pytest
from prepared_runs import prepare_tiny
from tiny_training import OtherDevice

import finetune
from finetune.devices.cpu import CpuDevice
from finetune.errors import ConfigurationError, ModelUnsupportedError
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


@pytest.mark.parametrize(("precision", "is_the_same"), [("fp16", True), ("bf16", False)])
def test_metrics_have_the_precision_of_the_run_where_the_device_has_it(
    precision: str, is_the_same: bool, finished_run: Path, tmp_path: Path
) -> None:
    run = copy_with_precision(finished_run, tmp_path / "run", precision)
    emitted: list[Event] = []
    scores = finetune.evaluate(run, split="validation", device="cpu", emit=emitted.append).scores
    expected = finetune.evaluate(finished_run, split="validation", device="cpu").scores
    assert (scores.loss == expected.loss) == is_the_same
    assert scores.loss == pytest.approx(expected.loss, rel=0.02)
    warnings = [event for event in emitted if isinstance(event, WarningMessage)]
    assert any("can't compute in fp16" in one.message for one in warnings) == is_the_same


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
    seconds = iter([1.0, 1.0, 1.0, 99.0, 99.0, 99.0] * 2)
    monkeypatch.setattr(CpuDevice, "time_calls", lambda *_, **__: next(seconds))
    with pytest.raises(ConfigurationError, match="takes 99 times as long as in fp32"):
        prepare_tiny(tiny_folder, precision="bf16")
    prepare_tiny(tiny_folder, precision="bf16", check_device=False)
    run = RunFolder(copy_with_precision(finished_run, tmp_path / "run", "bf16"))
    emitted: list[Event] = []
    with sent_to(emitted.append):
        TrainedModel.load(run, device="cpu")
    assert any("99 times" in one.message for one in emitted if isinstance(one, WarningMessage))


@pytest.mark.parametrize("layers", [2, 4])
def test_weights_of_fewer_or_more_layers_than_the_configuration_has_are_refused(
    layers: int, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    file = run / "model" / "config.json"
    write_json(file, read_json(file) | {"num_hidden_layers": layers})
    with pytest.raises(
        ModelUnsupportedError, match="missing, of another size, or left over"
    ) as raised:
        finetune.predict(run, ["a text"], device="cpu")
    assert raised.value.remedy == f"restore {run / 'model'}, or make the run again"
