import copy
import resource
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_config
from torch import nn

from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.measure import measure
from finetune.batch_finder.trial import ExtractionTrial, Trial, build_model, build_trial
from finetune.devices.cpu import CpuDevice
from finetune.devices.select import select_device
from finetune.errors import ModelUnsupported
from finetune.model.mode import Mode


def tiny_case(architecture: str = "bert", mode: str = "full", part: Part = "whole") -> Case:
    config = architecture_of(tiny_config(architecture).to_dict())
    return Case("cpu", config, 3, Mode(mode), padded_length=16, precision="fp32", part=part)


def tiny_trial(architecture: str = "bert", mode: str = "full", part: Part = "whole") -> Trial:
    trial = build_trial(tiny_case(architecture, mode, part), device=CpuDevice())
    assert isinstance(trial, Trial)
    return trial


def changed_names(trial: Trial, batch_size: int) -> set[str]:
    before = copy.deepcopy(trial.training_state.model.state_dict())
    trial.take_update(batch_size=batch_size)
    after = trial.training_state.model.state_dict()
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_takes_updates_and_evaluates(architecture: str) -> None:
    trial = tiny_trial(architecture)
    trial.begin()
    for batch_size in (1, 3):
        assert changed_names(trial, batch_size)
        trial.evaluate(batch_size=batch_size)


def test_what_trains_is_what_the_mode_says() -> None:
    trial = tiny_trial(mode=Mode("head"))
    trial.begin()
    changed = changed_names(trial, 4)
    assert changed == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} | {
        "classifier.weight",
        "classifier.bias",
    }


def test_the_model_has_the_shape_of_its_config_and_as_many_classes_as_wanted() -> None:
    config = tiny_config("bert")
    config.num_labels = 17
    model = build_model(Case("cpu", architecture_of(config.to_dict()), 3, Mode("full"), 16, "fp32"))
    assert model.config.num_labels == 3
    assert model.classifier.out_features == 3
    assert model.config.hidden_size == config.hidden_size
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_one_token_is_masked_and_all_rows_are_as_wide_as_the_case() -> None:
    trial = tiny_trial()
    inputs = trial.inputs_of(torch.arange(5).numpy(), 16)
    assert inputs["input_ids"].shape == (5, 16)
    assert (~inputs["attention_mask"]).sum() == 1


def test_a_beginning_forgets_all_but_the_weights() -> None:
    trial = tiny_trial()
    trial.begin()
    trial.take_update(batch_size=2)
    assert len(trial.training_state.optimizer.state) > 0
    trial.evaluate(batch_size=2)
    assert not trial.training_state.model.training
    trial.begin()
    assert len(trial.training_state.optimizer.state) == 0
    assert all(parameter.grad is None for parameter in trial.training_state.model.parameters())
    assert trial.training_state.model.training


@pytest.mark.parametrize(("mode", "states_ndim"), [("last-1", 3), ("head", 2), ("classifier", 2)])
def test_the_parts_of_a_frozen_model_are_its_pass_and_an_update_on_what_that_gave(
    mode: str, states_ndim: int
) -> None:
    prefix = build_trial(tiny_case(mode=Mode(mode), part="prefix"), device=CpuDevice())
    assert isinstance(prefix, ExtractionTrial)
    states = prefix.run(batch_size=3)
    assert (len(states), states.ndim, states.requires_grad) == (3, states_ndim, False)
    suffix = tiny_trial(mode=Mode(mode), part="suffix")
    ran: list[nn.Module] = []
    first_layer = suffix.training_state.model.get_submodule("bert.encoder.layer.0.attention")
    first_layer.register_forward_hook(lambda module, *_: ran.append(module))
    suffix.begin()
    whole = tiny_trial(mode=Mode(mode))
    whole.begin()
    assert changed_names(suffix, 3) == changed_names(whole, 3)
    suffix.evaluate(batch_size=3)
    assert ran == []


def test_a_model_of_which_nothing_is_frozen_has_no_parts() -> None:
    with pytest.raises(ModelUnsupported, match="can't be cut off"):
        build_trial(tiny_case(mode=Mode("full"), part="prefix"), device=CpuDevice())


@pytest.fixture
def _lift_cap() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize("part", ["whole", "prefix", "suffix"])
@pytest.mark.usefixtures("_lift_cap")
def test_each_part_is_measured(part: Part) -> None:
    device = CpuDevice()
    trial = build_trial(tiny_case(mode=Mode("head"), part=part), device=device)
    measurement = measure(trial, batch_size=4, budget_bytes=device.memory.budget_bytes(None))
    assert measurement.examples_per_second > 0
    assert not measurement.is_strained
    assert measurement.peak_bytes is None or measurement.peak_bytes > 2**20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("part", ["whole", "prefix", "suffix"])
@pytest.mark.parametrize("mode", ["last-1", "head"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_part_is_measured_on_a_real_gpu(part: Part, mode: str, precision: str) -> None:
    device = select_device("cuda", emit=lambda _: None)
    case = replace(tiny_case(mode=Mode(mode), part=part), device="cuda", precision=precision)
    trial = build_trial(case, device=device)
    measurement = measure(trial, batch_size=4, budget_bytes=device.memory.budget_bytes(None))
    assert measurement.examples_per_second > 0
    assert measurement.peak_bytes
