"""Whether a run trains on stored features of its frozen layers, and where they are stored."""

from collections.abc import Mapping

from torch import nn

from finetune.config.mode import Mode
from finetune.config.schema import CacheConfig
from finetune.devices.base import place
from finetune.devices.batch_size import BatchSize
from finetune.events import Emit, WarningMessage
from finetune.model.feature_extractor import FeatureExtractor, split_frozen
from finetune.model.features import (
    FeaturesNotStored,
    FrozenLayers,
    key_of_frozen_layers,
    with_features,
)
from finetune.model.load import TextModel
from finetune.runs.cache import open_tensor_store
from finetune.runs.preparation import Preparation
from finetune.tokenization.examples import Examples
from finetune.training.parity import FeatureCheck


def stores_features(options: CacheConfig, mode: Mode) -> bool:
    """Return whether features of frozen layers are stored, if the model can be split."""
    return mode.freezes_layers and options.feature_cache


def make_feature_extractor(text_model: TextModel) -> FeatureExtractor | None:
    """Return a model split into frozen and trainable layers, or None if it can't be."""
    return split_frozen(
        text_model.model,
        takes_4d_mask=text_model.structure.takes_4d_mask,
        pads_left=text_model.tokenizer.padding_side == "left",
    )


def stored_features(
    preparation: Preparation, batch_size: BatchSize, *, emit: Emit
) -> tuple[nn.Module, Mapping[str, Examples]]:
    """Return what runs at every step, and the splits as it reads them.

    That is the trainable layers and features, computed now or read from the store. Where nothing is
    frozen, or the model can't be split, it is the whole model and token ids.

    Args:
        preparation: The run; its model goes to the device.
        batch_size: Examples in one forward; fewer after memory ran out.
        emit: Receives progress events.

    Raises:
        DeviceDiffers: If features that the device has computed differ from the CPU's.
    """
    config, text_model = preparation.config, preparation.text_model
    if not stores_features(config.cache, preparation.mode):
        return text_model.model, preparation.examples
    extractor = make_feature_extractor(text_model)
    if extractor is None:
        emit(
            WarningMessage(
                f"{type(text_model.model).__name__} can't be split into frozen and trainable "
                "layers: the frozen ones run at every step"
            )
        )
        return text_model.model, preparation.examples
    found = _checked_features(preparation, extractor, batch_size, emit=emit)
    return (extractor.trainable, found) if found else (text_model.model, preparation.examples)


def _checked_features(
    preparation: Preparation,
    extractor: FeatureExtractor,
    batch_size: BatchSize,
    *,
    emit: Emit,
) -> Mapping[str, Examples] | None:
    """Return the splits as features; None, with a warning, if these do not fit the disk."""
    text_model, device = preparation.text_model, preparation.device
    precision = preparation.config.training.precision
    # The key is made of tensors on the CPU, and so are the features to compare with.
    key = key_of_frozen_layers(extractor, device=device, precision=precision)
    train = preparation.examples["train"]
    check = FeatureCheck.prepare(extractor, train) if preparation.checks_device else None
    place(text_model.model, device.torch_device)
    layers = FrozenLayers(extractor, key, device, precision, text_model.structure.takes_4d_mask)
    try:
        examples = _all_features(preparation, layers, batch_size, emit=emit)
    except FeaturesNotStored as error:
        emit(
            WarningMessage(
                f"the features can't be stored ({error}): the frozen layers run at every step",
                remedy="make room with finetune cache clear, or name a folder with --cache-dir",
            )
        )
        return None
    if check:
        check.compare(examples["train"], device=device, precision=precision)
    return examples


def _all_features(
    preparation: Preparation, layers: FrozenLayers, batch_size: BatchSize, *, emit: Emit
) -> Mapping[str, Examples]:
    config = preparation.config
    store = open_tensor_store(config.cache)
    notes = {"model": config.model.model, "mode": preparation.mode, "data": config.data.data}
    return {
        split: batch_size.retry_on_out_of_memory(
            lambda size, split=split, examples=examples: with_features(  # type: ignore[misc]
                examples,
                layers,
                store,
                padded_lengths=preparation.plan.padded_lengths,
                batch_size=size,
                notes=notes | {"split": split, "rows": len(examples.labels)},
                emit=emit,
                processes=preparation.processes,
            )
        )
        for split, examples in preparation.examples.items()
    }
