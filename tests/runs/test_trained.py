"""The model of a finished run, loaded to be used."""

import shutil
from pathlib import Path

import pytest

import finetune
from finetune.errors import ModelUnsupported
from finetune.events import Event, WarningMessage


def copy_with_precision(run: Path, folder: Path, precision: str) -> Path:
    shutil.copytree(run, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("precision: fp32", f"precision: {precision}"))
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
    assert [one for one in warnings if "can't compute in fp16" in one.message] == [
        one for one in warnings if "computed in fp32" in one.remedy
    ]
    assert any("can't compute in fp16" in one.message for one in warnings) == is_the_same


@pytest.mark.parametrize("content", ["{", "{}", '{"id2label": {"1": "a"}}'])
def test_a_model_whose_configuration_is_damaged_is_refused(
    content: str, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "model" / "config.json").write_text(content)
    with pytest.raises(ModelUnsupported):
        finetune.predict(run, ["a text"], device="cpu")
