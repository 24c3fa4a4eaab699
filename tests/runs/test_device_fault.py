"""What is left of a run whose device computes wrongly."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import ZeroRows, plant
from prepared_runs import prepare_tiny, train_prepared
from tiny_training import OtherDevice

import finetune
from finetune.errors import DeviceDiffers
from finetune.events import Event, Step, ignore
from finetune.model.features import FrozenLayers
from finetune.runs.folder import RunFolder
from finetune.runs.preparation import Preparation
from finetune.runs.run import Run
from finetune.training import loop


def prepare_on_other(model: Path, **options: Any) -> Preparation:
    return replace(prepare_tiny(model, **options), device=OtherDevice())


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(math.inf, id="always checked", marks=pytest.mark.slow),
        pytest.param(-1.0, id="checked too late"),
    ],
)
def test_run_of_a_device_that_begins_to_err_goes_on_from_its_last_good_checkpoint(
    share: float, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = prepare_on_other(tiny_folder, num_train_epochs=4)
    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "SHARE_BEFORE_SAVING", math.inf)

    def plant_once(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            plant(run.training_state, ZeroRows())
            monkeypatch.setattr(loop, "SHARE_BEFORE_SAVING", share)
        if isinstance(event, Step) and event.step == 14:
            monkeypatch.setattr(loop, "SHARE_AT_REPORTS", math.inf)

    with RunFolder(folder).create(overwrite=False) as held:
        run = Run.start(preparation, held, emit=plant_once)
        with pytest.raises(DeviceDiffers) as found:
            run.train()

    command = f"finetune run --resume-from-checkpoint {folder} --device cpu"
    assert found.value.remedy.startswith(f"resume from step-4 with: {command}; finetune doctor")
    assert [one.name for one in (folder / "checkpoints").glob("step-*")] == ["step-4"]
    results = finetune.run(resume_from_checkpoint=folder, device="cpu")
    assert results.training.epoch == 4


@pytest.mark.parametrize(
    "trained",
    [pytest.param({"freeze_core": True}, marks=pytest.mark.slow), {"train_layers": 1}],
    ids=str,
)
def test_features_that_a_device_has_computed_wrongly_are_found_before_training(
    trained: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cache_dir": str(tmp_path / "cache"), "precision": "bf16", "max_steps": 1, **trained}
    train_prepared(prepare_on_other(tiny_folder, **options), tmp_path / "right")
    compute = FrozenLayers.features

    def compute_wrongly(layers: FrozenLayers, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return compute(layers, inputs).flip(-1)

    monkeypatch.setattr(FrozenLayers, "features", compute_wrongly)
    options["cache_dir"] = str(tmp_path / "other")
    with pytest.raises(DeviceDiffers, match="features of the frozen layers"):
        train_prepared(prepare_on_other(tiny_folder, **options), tmp_path / "wrong", emit=ignore)
