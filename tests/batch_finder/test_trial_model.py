import copy
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_case

from finetune.batch_finder import trial_model
from finetune.batch_finder.results import Part
from finetune.batch_finder.trial_model import TrialModel, build_trial_model, measure
from finetune.config.modes import Mode
from finetune.devices.cpu import CpuDevice
from finetune.devices.select import select_device


def tiny_model(architecture: str = "bert", **changes: Any) -> TrialModel:
    model = build_trial_model(tiny_case(architecture, **changes), device=CpuDevice())
    assert isinstance(model, TrialModel)
    return model


def changed_names(model: TrialModel, batch_size: int) -> set[str]:
    before = copy.deepcopy(model.trainer.model.state_dict())
    model.take_step(batch_size=batch_size)
    after = model.trainer.model.state_dict()
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_trains_and_evaluates(architecture: str) -> None:
    model = tiny_model(architecture)
    model.begin()
    for batch_size in (1, 3):
        assert changed_names(model, batch_size)
        model.evaluate(batch_size=batch_size)


@pytest.mark.parametrize(("mode", "tokens"), [("last-1", 16), ("head", 1), ("classifier", 1)])
def test_split_model_extracts_features_and_trains_on_features(mode: str, tokens: int) -> None:
    extraction = build_trial_model(tiny_case(mode=Mode(mode), part="features"), device=CpuDevice())
    assert extraction.frozen_layers
    # The first layer is frozen, so feature extraction runs it and training skips it.
    ran: list[int] = []
    whole_model = extraction.frozen_layers.model
    first_layer = whole_model.get_submodule("bert.encoder.layer.0.attention")
    first_layer.register_forward_hook(lambda module, given, result: ran.append(len(given[0])))
    extraction.begin()
    extraction.take_step(batch_size=3)
    assert ran == [3]

    trainable = tiny_model(mode=Mode(mode), part="trainable")
    features = trainable._inputs_of(np.arange(3), 16)["inputs_embeds"]
    assert (features.shape, features.requires_grad) == ((3, tokens, 32), False)
    first_layer = trainable.trainer.model.get_submodule("bert.encoder.layer.0.attention")
    first_layer.register_forward_hook(lambda module, given, result: ran.append(len(given[0])))
    trainable.begin()
    whole = tiny_model(mode=Mode(mode))
    whole.begin()
    assert changed_names(trainable, 3) == changed_names(whole, 3)
    trainable.evaluate(batch_size=3)
    assert ran == [3]


@pytest.fixture
def _measure_briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep timings short, and restore the memory limit that a measurement sets."""
    monkeypatch.setattr(trial_model, "_MIN_TIMED_SECONDS", 0.02)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize("part", ["whole", "features", "trainable"])
@pytest.mark.parametrize("mode", ["last-1", "head"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "fp32"),
        *(pytest.param("cuda", one, marks=pytest.mark.cuda) for one in ("fp32", "bf16", "fp16")),
    ],
)
@pytest.mark.usefixtures("_measure_briefly")
def test_speed_and_memory_of_each_part_are_measured(
    name: str, precision: str, mode: str, part: Part
) -> None:
    device = select_device(name)
    case = tiny_case(mode=Mode(mode), part=part, device=name, precision=precision)
    model = build_trial_model(case, device=device)
    measurement = measure(model, batch_size=4, budget_bytes=device.memory.budget_bytes(None))
    assert measurement.examples_per_second > 0
    assert measurement.peak_bytes is None or measurement.peak_bytes > 2**12
