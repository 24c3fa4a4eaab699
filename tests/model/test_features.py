from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, SIZES, tiny_config, tiny_model
from tiny_training import CLASSES, copied_parameters, random_texts, tiny_plan
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    ConvBertConfig,
    GPT2Config,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    XLMRobertaConfig,
    XLNetConfig,
)

from finetune.config.modes import Mode
from finetune.devices.cpu import CpuDevice
from finetune.model.features import FrozenLayers, split_frozen
from finetune.model.structure import Structure, find_structure, freeze_parameters, set_training
from finetune.tasks.single import Single
from finetune.tokenization.examples import collate, prepare_mask
from finetune.training.micro_batches import MicroBatch
from finetune.training.trainer import Trainer

Inputs = dict[str, torch.Tensor]


def modernbert_with_mean_pooling() -> PreTrainedConfig:
    config = tiny_config("modernbert")
    config.classifier_pooling = "mean"
    return config


OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "modernbert, mean": modernbert_with_mean_pooling,
    "albert": lambda: AlbertConfig(**SIZES, embedding_size=16),
    "mpnet": lambda: MPNetConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, bos_token_id=2, eos_token_id=3),
}
# Each architecture with its last layer and with its head. Other modes are slow.
CASES = [
    *((name, mode) for name in ARCHITECTURES for mode in ("last-1", "head")),
    *((name, "last-1") for name in OTHERS),
    *(pytest.param(name, "classifier", marks=pytest.mark.slow) for name in ARCHITECTURES),
    *(pytest.param(name, "head", marks=pytest.mark.slow) for name in OTHERS),
]
# GPT-2 finds the end of a text by its tokens, XLNet features have a different shape, and ConvBERT
# mixes features of padding into features of real tokens.
UNSPLITTABLE: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=3, n_head=4, n_positions=64,
        pad_token_id=0, bos_token_id=2, eos_token_id=3,
    ),
    "xlnet": lambda: XLNetConfig(
        vocab_size=SIZES["vocab_size"], d_model=32, n_layer=3, n_head=4, d_inner=48, pad_token_id=0,
        bos_token_id=2, eos_token_id=3,
    ),
    "convbert": lambda: ConvBertConfig(**SIZES, embedding_size=16),
}  # fmt: skip


def make_model(name: str) -> PreTrainedModel:
    """Return a reproducible random classifier in which all parameters affect the logits."""
    if name in ARCHITECTURES:
        model = tiny_model(name, classes=CLASSES)
    else:
        torch.manual_seed(0)
        config = (OTHERS | UNSPLITTABLE)[name]()
        config.num_labels = CLASSES
        model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Zero biases and unit norm weights would hide missing parameters.
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def freeze(model: PreTrainedModel, mode: str) -> Structure:
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=Mode(mode))
    return structure


def split(model: PreTrainedModel, structure: Structure) -> FrozenLayers | None:
    mask = structure.takes_4d_mask
    return split_frozen(
        model, device=CpuDevice(), precision="fp32", takes_4d_mask=mask, pads_left=False
    )


def train_steps(model: nn.Module, inputs: Inputs, structure: Structure) -> None:
    """Take four steps on one batch, with the same dropout for the same batch."""
    plan = tiny_plan(total_steps=4, warmup_fraction=0.25)
    trainer = Trainer(model, plan, task=Single(), device=CpuDevice(), head=structure.head)
    set_training(trainer.model)
    torch.manual_seed(7)
    labels = torch.arange(len(next(iter(inputs.values())))) % CLASSES
    batch = MicroBatch(inputs, labels, torch.full((len(labels),), 1 / len(labels)))
    for number in range(4):
        trainer.take_step(number, [batch])


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_split_model_steps_are_bit_identical_to_whole_model(name: str, mode: str) -> None:
    whole, divided = make_model(name), make_model(name)
    before = copied_parameters(whole)
    structure = freeze(whole, mode)
    freeze(divided, mode)
    tokens = collate(random_texts(8), np.arange(8), padded_length=14)
    inputs = prepare_mask(tokens, takes_4d_mask=structure.takes_4d_mask)
    layers = split(divided, structure)
    assert layers is not None
    mask = inputs["attention_mask"] if layers.per_token else None
    features = layers.trainable_inputs(layers.extract(inputs), mask)
    train_steps(whole, inputs, structure)
    train_steps(layers.trainable, features, structure)
    expected, actual = copied_parameters(whole), copied_parameters(divided)
    assert any(not torch.equal(expected[parameter], before[parameter]) for parameter in expected)
    for parameter, values in expected.items():
        assert torch.equal(actual[parameter], values), parameter


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt2", "last-1"), ("gpt2", "head"), ("xlnet", "last-1"), ("convbert", "last-1")],
)
def test_model_whose_upper_layers_need_more_than_features_is_not_split(
    name: str, mode: str
) -> None:
    model = make_model(name)
    assert split(model, freeze(model, mode)) is None
