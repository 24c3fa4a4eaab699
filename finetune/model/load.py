"""Loads a model with its tokenizer from a Hub ID or a folder, and saves them to a folder."""

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from finetune.config.schema import ModelConfig, Pooling
from finetune.devices.base import BatchShapes
from finetune.devices.private import tree_iter
from finetune.errors import ModelUnsupportedError, UsageError
from finetune.events import WarningMessage, emit
from finetune.model.mean_pooling import (
    compute_only_first_token,
    has_mean_layer,
    pool_by_first_token,
    pool_by_mean,
)
from finetune.model.source import MINILM, ModelSource, find_model, silence_transformers
from finetune.model.structure import Structure, find_structure, record_calls
from finetune.tasks.base import PIPELINE, Task
from finetune.tokenization.encode import EncodedTexts, encode_texts
from finetune.tokenization.examples import ModelInputs, choose_padded_lengths, inputs_of_texts

if TYPE_CHECKING:
    from finetune.tokenization.encode import Texts

# Key in tokenizer_config.json for the original model_max_length of the tokenizer.
LONGEST = "pretrained_max_length"
# Maximum relative effect of padding on the input of the output layer. Rounding has an effect of
# 1e-6, and padding has 0.3 with FNet, which has no attention mask.
MAX_PADDING_ERROR = 0.02


@dataclass(frozen=True)
class TextModel:
    """A model loaded to the CPU in fp32, with its tokenizer, structure, task and source.

    Loading with this ``pooling`` gives the same model. ``auto`` is the pretrained model's pooling.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    structure: Structure
    task: Task
    source: ModelSource
    pooling: Pooling

    @property
    def output_parameters(self) -> list[nn.Parameter]:
        """The parameters of the layer that computes the logits."""
        return [self.model.get_parameter(name) for name in sorted(self.structure.output_layer)]

    @property
    def vocabulary_size(self) -> int:
        """Number of token IDs that the model has embeddings for."""
        with self.source.failures_explained():
            embeddings: torch.Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
            return len(embeddings)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that the model has positions for."""
        tokenizer = self.tokenizer
        longest = tokenizer.init_kwargs.get(LONGEST, tokenizer.model_max_length)
        limits = [longest, count_positions(self.model)]
        return int(min(limit for limit in limits if limit is not None))

    def encode(
        self,
        texts: "Texts",
        pairs: "Texts | None" = None,
        *,
        max_length: int,
        stride: int | None = None,
    ) -> EncodedTexts:
        """Tokenize texts or pairs, up to the maximum length and the model's positions."""
        max_tokens = min(max_length, self.max_tokens)
        return encode_texts(self.tokenizer, texts, pairs, max_length=max_tokens, stride=stride)

    def inputs(self, encoded: EncodedTexts) -> ModelInputs:
        """Convert encoded texts to model inputs.

        Raise ModelUnsupportedError for token IDs or types that the model lacks.
        """
        types = getattr(self.model.config, "type_vocab_size", 0)  # 0: the model ignores them
        limits = {"input_ids": self.vocabulary_size, "token_type_ids": types or sys.maxsize}
        for name, ids in encoded.columns.items():
            kind, limit = "ID" if name == "input_ids" else "type", limits[name]
            highest = max(ids.max(initial=0), encoded.padding[name])
            if highest >= limit:
                raise ModelUnsupportedError(
                    f"the tokenizer of {self.source.name} returns token {kind} {highest}, but the "
                    f"model only has {kind}s up to {limit - 1}",
                    remedy="check that config.json, weights and tokenizer belong to the same model",
                )
        return inputs_of_texts(encoded, takes_4d_mask=self.structure.takes_4d_mask)

    def padded_lengths(self, lengths: NDArray[np.int64], shapes: BatchShapes) -> list[int]:
        """Return padded lengths, at most the model's number of positions."""
        chosen = choose_padded_lengths(lengths, shapes)
        return sorted({min(padded_length, self.max_tokens) for padded_length in chosen})


def load_model(
    name: str,
    *,
    revision: str | None,
    task: Task,
    from_scratch: bool,
    strict: bool = False,
    pooling: Pooling = "auto",
) -> TextModel:
    """Load a pretrained encoder with a new head or, with ``strict``, a model exactly as saved.

    A new head is initialized from torch's global random state. If the architecture doesn't support
    mean pooling, the ``pooling`` of the result is auto.
    """
    source = find_model(name, revision=revision)
    config, tokenizer = source.read_model_config(), source.read_tokenizer()
    has_own_outputs = [*(config.id2label or {}).values()] == [*task.output_names]
    saved = (getattr(config, "task_specific_params", None) or {}).get(PIPELINE, {})
    task.configure(config)
    if getattr(config, "pad_token_id", None) is None:
        # Heads that read the last token before the padding need it.
        config.pad_token_id = tokenizer.pad_token_id
    with source.failures_explained(), silence_transformers():
        weights = source.read_weights(may_be_missing=from_scratch)
        model, not_loaded, unexpected = _build(config, weights)
        if pooling == "mean" and not pool_by_mean(model):
            pooling = "auto"
        elif pooling == "cls":
            pool_by_first_token(model)
        structure = find_structure(model, has_mean_layer=has_mean_layer(model))
        if structure.mean_layer:
            compute_only_first_token(model)
    optional = frozenset() if strict else structure.head | structure.mean_layer
    faults = [f"{name}{fault}" for name, fault in not_loaded.items() if name not in optional]
    if strict or not from_scratch:
        _check_weights(model, source, faults, unexpected, strict=strict)
    elif faults:
        message = f"{len(faults)} parameters of the encoder are not in the weights of {name}"
        emit(WarningMessage(f"{message} and are initialized randomly: {faults[0]}"))
    if structure.output_layer.isdisjoint(not_loaded) and not has_own_outputs:
        # It was trained on other classes.
        for parameter in map(model.get_parameter, sorted(structure.output_layer)):
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=getattr(config, "initializer_range", 0.02))
    structure = replace(structure, new=structure.head.intersection(not_loaded))
    text_model = TextModel(model, tokenizer, structure, task, source, pooling)
    if not strict:
        _check_padding(text_model)
    if has_own_outputs and not structure.new & structure.output_layer:
        task.unscale_output_layer(text_model.output_parameters, saved=saved)
    return text_model


def load_pretrained(options: ModelConfig, task: Task, *, seed: int, pooling: Pooling) -> TextModel:
    """Load the model of a run with a new head, determined by the seed."""
    torch.manual_seed(seed)
    model, revision, from_scratch = options.model, options.revision, options.from_scratch
    return load_model(
        model, revision=revision, task=task, from_scratch=from_scratch, pooling=pooling
    )


def save_model(
    text_model: TextModel, folder: Path, *, max_length: int, with_weights: bool = True
) -> None:
    """Save a model. Pipelines with ``truncation=True`` then truncate texts like the run."""
    text_model.task.configure(text_model.model.config)
    with silence_transformers():
        (text_model.model if with_weights else text_model.model.config).save_pretrained(folder)
    tokenizer = text_model.tokenizer
    longest = tokenizer.model_max_length
    tokenizer.model_max_length = min(max_length, text_model.max_tokens)
    tokenizer.init_kwargs.setdefault(LONGEST, longest)
    try:
        # The state of the tokenizer depends on the texts that it read last.
        side, limit = tokenizer.truncation_side, tokenizer.model_max_length
        tokenizer.backend_tokenizer.enable_truncation(limit, direction=side)
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.model_max_length = longest


def _build(
    config: PreTrainedConfig, weights: dict[str, torch.Tensor]
) -> tuple[PreTrainedModel, dict[str, str], Iterable[str]]:
    """Build the text classifier of a config in fp32.

    Also return the problem of each parameter that is missing or has another shape, and the names
    of weights that the model lacks.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"transformers has no text classifier of type {config.model_type}")
    model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    # If it gets weights instead of a folder, transformers opens no files.
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # A missing buffer keeps its initial value.
    buffers = {name for name, _ in model.named_buffers()}
    faults = {name: " is missing" for name in sorted(info["missing_keys"]) if name not in buffers}
    for name, saved_shape, shape in info["mismatched_keys"]:
        faults[name] = f" has shape {list(saved_shape)} instead of {list(shape)}"
    return model, faults, info["unexpected_keys"]


def _check_weights(
    model: PreTrainedModel,
    source: ModelSource,
    faults: Sequence[str],
    unexpected: Iterable[str],
    *,
    strict: bool,
) -> None:
    """Reject weights with faults or for more layers and, if ``strict``, any unused weights."""

    def kind_of(name: str) -> str:
        return re.sub(r"\.\d+\.", ".N.", name).removeprefix(f"{model.base_model_prefix}.")

    kinds = {kind_of(name) for name, _ in model.named_parameters()}
    unknown = sorted(name for name in unexpected if strict or kind_of(name) in kinds)
    faults = [*faults, *(f"config.json describes no layer for {name}" for name in unknown)]
    if faults:
        remedy = "check that config.json and the weights belong to the same model"
        raise ModelUnsupportedError(
            f"the weights of {source.name} do not match its config.json: {faults[0]}",
            remedy=remedy if strict else f"{remedy}, or add --from-scratch",
        )


def _check_padding(text_model: TextModel) -> None:
    """Reject models whose result for a text depends on padding."""
    model, tokenizer = text_model.model, text_model.tokenizer
    output_layer = next(iter(text_model.structure.output_layer)).rpartition(".")[0]
    words = np.setdiff1d(np.arange(text_model.vocabulary_size), tokenizer.all_special_ids)
    lengths, padding = (9, 3), {"input_ids": tokenizer.pad_token_id}
    tokens = np.resize(words[:7].astype(np.int32), sum(lengths))
    offsets, pads_left = np.cumsum([0, *lengths]), tokenizer.padding_side == "left"
    encoded = EncodedTexts({"input_ids": tokens}, offsets, padding, pads_left, 0)
    inputs_of = text_model.inputs(encoded).inputs_of

    def read(rows: list[int], padded_length: int) -> torch.Tensor:
        with text_model.source.failures_explained():
            calls = record_calls(model, inputs_of(np.array(rows), padded_length))
        features = calls[output_layer].features
        # Some heads compute logits of all tokens, and select the logits of the last token.
        logits: torch.Tensor = calls[""].output.logits
        return logits if features is None or features.ndim > 2 else features

    padded = read([0, 1], max(lengths) + 3)
    unpadded = torch.cat([read([row], length) for row, length in enumerate(lengths)])
    error = ((padded - unpadded).norm() / unpadded.norm()).item()
    if error > MAX_PADDING_ERROR:
        raise ModelUnsupportedError(
            f"{type(model).__name__} gives different results for the same text with padding on the "
            f"{tokenizer.padding_side}: its features differ by {error:.1%}",
            remedy="choose an encoder with an attention mask, such as bert-base-uncased",
        )


# Published shapes that differ from the default, BERT-base, to avoid the Hub.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "bert-base-uncased": {},
    "bert-large-uncased": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    MINILM: {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
}


def load_shape(name: str, *, revision: str | None) -> PreTrainedConfig:
    """Return the config of a model, without downloading weights from the Hub."""
    if name in _PUBLISHED and revision is None:
        return BertConfig(**_PUBLISHED[name])
    source = find_model(name, revision=revision, with_weights=False)
    config = source.read_model_config()
    with source.failures_explained(), torch.device("meta"):
        AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    return config


def random_classifier(name: str, *, classes: int, seed: int) -> PreTrainedModel:
    """Return a classifier with a model's shape and reproducible weights, on the CPU in fp32."""
    shape = load_shape(name, revision=None)
    shape.num_labels = classes
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
            shape, dtype=torch.float32
        )
    return model


def max_positions(shape: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens that a shape has positions for, or None for no limit."""
    with torch.device("meta"):
        return count_positions(AutoModel.from_config(shape, trust_remote_code=False))  # type: ignore[no-untyped-call]


def count_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that a model has positions for, or None for no limit."""
    positions: int = getattr(model.config, "max_position_embeddings", None) or -1
    if positions < 0:  # XLNet has -1, since it only uses relative positions.
        return None
    # RoBERTa and similar models start positions after the padding token ID.
    embeddings = getattr(model.base_model, "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    return positions if padding_id is None else positions - int(padding_id) - 1


def load_factory(name: str) -> tuple[nn.Module, dict[str, object]]:
    """Call ``package.module:function``, which returns a module and its keyword arguments."""
    module_name, _, function_name = name.partition(":")
    try:
        result = getattr(importlib.import_module(module_name), function_name)()
    # User code may raise anything, or exit.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name} can't be called: {type(error).__name__}: {error}",
            remedy="use package.module:function such that python -c 'import package.module' works; "
            "--debug shows where it fails",
        ) from error
    match result:
        case (nn.Module() as module, dict() as batch):
            return module, batch
    remedy = "return (module, batch), the batch as a dict of keyword arguments"
    raise UsageError(f"{name} does not return a module and a batch", remedy=remedy)


def loss_of(output: Any) -> torch.Tensor:
    """Return the ``loss`` of a model output, or the sum of its floating-point tensors."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = (tensor for tensor in tree_iter(output) if isinstance(tensor, torch.Tensor))
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    if not sums:
        remedy = "let its forward return a loss or a floating-point tensor"
        raise UsageError("the output of the module has no loss", remedy=remedy)
    return torch.stack(sums).sum()
