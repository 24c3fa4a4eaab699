"""Features of the frozen layers of a run: computed once, or read from the store."""

from collections.abc import Mapping
from functools import partial

from torch import nn

from finetune.config.mode import Mode
from finetune.config.schema import CacheConfig
from finetune.devices.base import move_to_device
from finetune.devices.batch_size import BatchSize
from finetune.events import WarningMessage, emit
from finetune.model.features import (
    FeatureExtractor,
    FeaturesNotStoredError,
    FrozenLayers,
    key_of_frozen_layers,
    split_frozen,
    with_features,
)
from finetune.model.load import TextModel
from finetune.model.tensor_store import open_tensor_store
from finetune.runs.preparation import Preparation
from finetune.tokenization.examples import Examples
from finetune.training.parity import prepare_feature_check


def stores_features(options: CacheConfig, mode: Mode) -> bool:
    """Return whether features of frozen layers are stored, if the model can be split."""
    return mode.trained_layers is not None and options.feature_cache


def make_feature_extractor(text_model: TextModel) -> FeatureExtractor | None:
    """Return a model split into frozen and trainable layers, or None if it can't be."""
    return split_frozen(
        text_model.model,
        takes_4d_mask=text_model.structure.takes_4d_mask,
        pads_left=text_model.tokenizer.padding_side == "left",
    )


def stored_features(
    preparation: Preparation, batch_size: BatchSize
) -> tuple[nn.Module, Mapping[str, Examples]]:
    """Return the model that runs at every step, and its inputs for each split.

    If frozen layers can be split off, this is the trainable layers, and its inputs are features.
    """
    config, text_model, device = preparation.config, preparation.text_model, preparation.device
    whole, precision = (text_model.model, preparation.examples), config.training.precision
    if not stores_features(config.cache, preparation.mode):
        return whole
    extractor = make_feature_extractor(text_model)
    if extractor is None:
        name = type(text_model.model).__name__
        message = f"{name} can't be split into frozen and trainable layers"
        emit(WarningMessage(f"{message}: the frozen ones run at every step"))
        return whole
    # The key needs tensors on the CPU, and so do the features to compare with.
    key, check = key_of_frozen_layers(extractor, device=device, precision=precision), None
    if preparation.plan.checks_device:
        check = prepare_feature_check(
            extractor, preparation.examples["train"], device=device, precision=precision
        )
    move_to_device(text_model.model, device.torch_device)
    layers = FrozenLayers(extractor, key, device, precision, text_model.structure.takes_4d_mask)
    store = open_tensor_store(config.cache)

    def compute(split: str, examples: Examples) -> Examples:
        attempt = partial(
            with_features, examples, layers, store, split=split,
            padded_lengths=preparation.plan.padded_lengths,
        )  # fmt: skip
        return batch_size.retry_on_out_of_memory(lambda size: attempt(batch_size=size))

    try:
        if preparation.pool:
            whole_pool = compute("train", preparation.pool)
            features = {name: whole_pool.select(rows) for name, rows in preparation.rows.items()}
        else:
            features = {
                name: compute(name, examples) for name, examples in preparation.examples.items()
            }
    except FeaturesNotStoredError as error:
        message = f"the features can't be stored ({error}): the frozen layers run at every step"
        remedy = "free space with finetune cache clear, or choose a folder with --cache-dir"
        emit(WarningMessage(message, remedy=remedy))
        return whole
    if check:
        check(features["train"])
    return extractor.trainable, features
