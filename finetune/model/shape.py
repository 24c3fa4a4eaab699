"""Models without pretrained weights: the shape of a config, and modules of the user."""

import importlib
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from finetune.devices.private import tree_iter
from finetune.errors import UsageError
from finetune.model.source import MINILM, find_model

# Published shapes, to avoid the Hub: hidden size, layers, heads, intermediate size.
_PUBLISHED = {
    "bert-base-uncased": (768, 12, 12, 3072),
    "bert-large-uncased": (1024, 24, 16, 4096),
    MINILM: (384, 6, 12, 1536),
}


def load_shape(name: str, *, revision: str | None) -> PreTrainedConfig:
    """Return the config of a model, without downloading weights from the Hub."""
    if name in _PUBLISHED and revision is None:
        hidden_size, layers, heads, intermediate_size = _PUBLISHED[name]
        return BertConfig(
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate_size,
        )
    source = find_model(name, revision=revision, with_weights=False)
    config = source.read_model_config()
    with source.failures_explained(), torch.device("meta"):
        AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    return config


def random_classifier(name: str, *, classes: int, seed: int) -> PreTrainedModel:
    """Return a classifier with the shape of a model on the CPU, in fp32, the same at every call."""
    shape = load_shape(name, revision=None)
    shape.num_labels = classes
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            shape, dtype=torch.float32
        )
    return model


def max_positions(shape: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens that a shape has positions for, None for any."""
    with torch.device("meta"):
        return count_positions(AutoModel.from_config(shape, trust_remote_code=False))  # type: ignore[no-untyped-call]


def count_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that a model has positions for, None for any."""
    positions: int = getattr(model.config, "max_position_embeddings", None) or -1
    if positions < 0:  # XLNet has -1, since it only uses relative positions.
        return None
    # RoBERTa and similar models start positions after the padding token ID.
    embeddings = getattr(model.base_model, "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    return positions if padding_id is None else positions - int(padding_id) - 1


def load_factory(name: str) -> tuple[nn.Module, dict[str, object]]:
    """Return the module and its keyword arguments that ``package.module:function`` returns."""
    module_name, _, function_name = name.partition(":")
    try:
        result = getattr(importlib.import_module(module_name), function_name)()
    # Code of the user may raise anything, or exit.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name} can't be called: {type(error).__name__}: {error}",
            remedy="use package.module:function such that python -c 'import package.module' works; "
            "--debug shows where it fails",
        ) from error
    match result:
        case (nn.Module() as module, dict() as batch):
            return module, batch
    raise UsageError(
        f"{name} does not return a module and a batch",
        remedy="return (module, batch), the batch as a dict of keyword arguments",
    )


def loss_of(output: Any) -> torch.Tensor:
    """Return the ``loss`` of an output, or the sum of all its floating-point tensors."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = (tensor for tensor in tree_iter(output) if isinstance(tensor, torch.Tensor))
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    if not sums:
        raise UsageError(
            "the output of the module has no loss and no floating-point tensor",
            remedy="let its forward return one",
        )
    return torch.stack(sums).sum()
