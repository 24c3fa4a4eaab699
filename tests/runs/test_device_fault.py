"""The folder of a run whose device computes wrong results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import ZeroRows, plant
from prepared_runs import begin_run, prepare_tiny, train_prepared
from tiny_training import OtherDevice

from finetune.errors import FinetuneError
from finetune.events import Event, Step, sent_to
from finetune.model.features import FrozenLayers
from finetune.runs.prepare import RunInputs


def prepare_on_other(model: Path, **options: Any) -> RunInputs:
    return replace(prepare_tiny(model, **options), device=OtherDevice())


def test_a_run_of_a_device_that_begins_to_err_keeps_no_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs = prepare_on_other(tiny_folder, num_train_epochs=4)

    def plant_once(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            plant(run.trainer, ZeroRows())

    with (
        sent_to(plant_once),
        pytest.raises(FinetuneError, match="other differs from the CPU after step ") as found,
        begin_run(inputs, tmp_path / "run") as run,
    ):
        run.train()

    assert found.value.remedy.startswith("start again with --overwrite --device cpu; ")
    assert not (tmp_path / "run" / "model").exists()


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

    def compute_wrongly(*arguments: Any) -> torch.Tensor:
        return compute(*arguments).flip(-1)

    monkeypatch.setattr(FrozenLayers, "features", compute_wrongly)
    options["cache_dir"] = str(tmp_path / "other")
    with pytest.raises(FinetuneError, match="features of the frozen layers"):
        train_prepared(prepare_on_other(tiny_folder, **options), tmp_path / "wrong")
