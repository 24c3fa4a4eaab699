"""Mean pooling for models whose head reads one token. Saved models remain standard models.

The mean is one more encoder layer, with constant weights. Its queries and keys are zero, so that
attention is uniform over unmasked tokens. Values pass unchanged, and the projection after attention
multiplies their mean by ``SCALE``, so that the residual is negligible. The feed-forward block adds
zero. So every token becomes the normalized mean, including the token that the head reads. Here only
this token is computed, without matrix products. Saved models need no code from this package.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from finetune.errors import ModelUnsupportedError
from finetune.model.structure import REJECTIONS, Structure, encoder_layers, record_sample

# Factor of the mean. The residual is a thousandth of it, and the sum doesn't overflow in fp16.
SCALE = 1e3
# Maximum error of the shortcut against the whole layer, whose output has variance 1.
MAX_ROUNDING = 1e-4
# Maximum nonlinear fraction of the input of the output layer.
MAX_NONLINEAR = 0.05
# Factor of the input of tanh, which is linear within 1% for inputs of unit variance. The pooler of
# BERT returns values of this size.
TANH_SCALE = 0.05
# Shift of the input of ReLU and GELU, which return inputs this far above zero unchanged.
SHIFT = 30.0

# Factors of the identity in each linear module of a layer, by its name in BERT or DistilBERT.
_ZERO = ("attention.self.query", "attention.self.key", "attention.q_lin", "attention.k_lin")
_FEED_FORWARD = ("intermediate.dense", "output.dense", "ffn.lin1", "ffn.lin2")
_FACTORS: Mapping[str, float] = {
    **dict.fromkeys((*_ZERO, *_FEED_FORWARD), 0.0),
    **dict.fromkeys(("attention.self.value", "attention.v_lin"), 1.0),
    **dict.fromkeys(("attention.output.dense", "attention.out_lin"), SCALE),
}


def pool_by_mean(model: PreTrainedModel) -> bool:
    """Make the head of a CPU model read the mean of the tokens. Return False if impossible."""
    if hasattr(model.config, "classifier_pooling"):
        _set_pooling(model, "mean")
    elif not has_mean_layer(model):
        if (layer := _make_mean_layer(model)) is None:
            return False
        encoder_layers(model).append(layer)
        model.config.num_hidden_layers += 1
    return True


def pool_by_first_token(model: PreTrainedModel) -> None:
    """Undo ``pool_by_mean``."""
    if hasattr(model.config, "classifier_pooling"):
        _set_pooling(model, "bos" if model.config.model_type == "eurobert" else "cls")
    elif has_mean_layer(model):
        del encoder_layers(model)[-1]
        model.config.num_hidden_layers -= 1


def _set_pooling(model: PreTrainedModel, pooling: str) -> None:
    """Set the head's input, which EuroBERT copies from its config on initialization."""
    holders: tuple[Any, ...] = (model.config, model)
    for holder in holders:
        if hasattr(holder, "classifier_pooling"):
            holder.classifier_pooling = pooling


def pool_shape_by_mean(shape: PreTrainedConfig) -> bool:
    """Add the layer that ``pool_by_mean`` would add. Raise ModelUnsupportedError if it can't."""
    if hasattr(shape, "classifier_pooling"):
        return False
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(shape)  # type: ignore[no-untyped-call]
    if _make_mean_layer(model) is None:
        raise mean_pooling_unsupported_error(model)
    shape.num_hidden_layers += 1
    return True


def mean_pooling_unsupported_error(model: PreTrainedModel) -> ModelUnsupportedError:
    """Return the error for models that ``pool_by_mean`` can't change."""
    return ModelUnsupportedError(
        f"--pooling mean can't be used with {type(model).__name__}: it needs BERT-style layers",
        remedy="drop --pooling mean, or choose another model",
    )


def has_mean_layer(model: PreTrainedModel) -> bool:
    """Whether the last layer of a model is the constant layer from ``pool_by_mean``."""
    layers = encoder_layers(model)
    if len(layers) < 2:
        return False
    modules = layers[-1].named_modules()
    zero = [module for name, module in modules if isinstance(module, nn.Linear) and name in _ZERO]
    return bool(zero) and not any(module.weight.any() for module in zero)


@torch.no_grad()
def _make_mean_layer(model: PreTrainedModel) -> nn.Module | None:
    """Return a layer like the last one with weights for the mean, or None if impossible."""
    layers = encoder_layers(model)
    if not layers:
        return None
    # Share the model config, which selects the attention implementation.
    layer = copy.deepcopy(layers[-1], {id(model.config): model.config})
    layer.to_empty(device="cpu").requires_grad_(False).train(False)
    size = 0
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name in _FACTORS:
            module.weight.zero_().fill_diagonal_(_FACTORS[name])
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
            [size] = module.normalized_shape
        elif list(module.parameters(recurse=False)):
            return None
    features = torch.arange(10.0 * size).sin().view(2, 5, size)
    with suppress(*REJECTIONS):
        first_token = _compute_first_token(layer, features)
        if torch.allclose(layer(features)[:, :1], first_token, rtol=0, atol=MAX_ROUNDING):
            return layer
    return None


def compute_only_first_token(model: PreTrainedModel) -> None:
    """Make the constant layer compute only the first token, for the same result in less time."""
    layer = encoder_layers(model)[-1]
    layer.forward = partial(_compute_first_token, layer)


def _compute_first_token(
    layer: nn.Module, features: torch.Tensor, mask: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Compute [examples, 1, hidden] from [examples, tokens, hidden] and a 4-D mask."""
    if mask is None:
        mean = features.mean(1, keepdim=True)
    else:
        row = mask[:, 0, :1].transpose(1, 2)
        weights = (row if row.dtype == torch.bool else row == 0).to(features.dtype)
        mean = (features * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    output = SCALE * mean + features[:, :1]
    for norm in (module for module in layer.modules() if isinstance(module, nn.LayerNorm)):
        output = norm(output)
    return output


def pass_through_head(model: PreTrainedModel, structure: Structure) -> bool:
    """Make the head linear up to the output layer. Return False if impossible."""
    below = structure.head - structure.output_layer
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and f"{name}.weight" in below
    }
    if not modules:
        return True
    for module in modules.values():
        if module.bias is None or module.in_features != module.out_features:
            return False
    saved = {name: copy.deepcopy(module.state_dict()) for name, module in modules.items()}
    for factor, shift in ((TANH_SCALE, 0.0), (1.0, SHIFT)):
        for module in modules.values():
            nn.init.eye_(module.weight).data.mul_(factor)
            nn.init.constant_(module.bias, shift)
        if _passes_through(model, structure, first=next(iter(modules))):
            return True
    for name, module in modules.items():
        module.load_state_dict(saved[name])
    return False


def _passes_through(model: PreTrainedModel, structure: Structure, *, first: str) -> bool:
    """Whether the output layer input is an affine function of the head input."""
    calls = record_sample(model)
    output = next(name for name in calls if f"{name}.weight" in structure.output_layer)
    before, after = calls[first].features, calls[output].features
    if before is None or after is None or before.shape != after.shape:
        return False
    before, after = before - before.mean(), after - after.mean()
    factor = (before * after).sum() / before.square().sum()
    return bool((after - factor * before).norm() <= MAX_NONLINEAR * after.norm())
