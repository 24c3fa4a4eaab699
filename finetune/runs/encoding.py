"""Encode the texts of a split. The token ids of many texts are stored."""

import hashlib
from importlib.metadata import version

import numpy as np
import torch
from datasets import Dataset

from finetune import distributed
from finetune.config.schema import Config
from finetune.data.check import suggest_model
from finetune.data.dataset import TextColumns, column_of, texts_of, update_with_texts
from finetune.events import Info, WarningMessage, emit
from finetune.model.load import TextModel
from finetune.model.tensor_store import key_of, open_tensor_store
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.examples import Examples

# Encoding fewer takes a second or two.
MANY_TEXTS = 50_000


def encode_rows(rows: Dataset, split: str, text_model: TextModel, *, config: Config) -> Examples:
    """Encode the texts of a split, with a warning if some are truncated.

    All ranks call this with the same rows.
    """
    texts, task = texts_of(rows), text_model.task
    if len(rows) < MANY_TEXTS or not config.cache.feature_cache:
        encoded = _encode(texts, text_model, config)
    else:
        encoded = _read_or_encode(texts, split, text_model, config)
    labels = task.labels(column_of(rows, "label"))
    inputs = text_model.inputs(encoded)
    examples = Examples(
        inputs.inputs_of,
        inputs.lengths,
        labels,
        task.example_weights(labels),
        windows=inputs.windows,
        truncated_texts=encoded.truncated_texts,
    )
    hint = "read all of it with --long-texts windows" if texts.pairs is None else "shorten them"
    if config.model.max_length < text_model.max_tokens:
        hint = f"raise --max-length or {hint}"
    _report_long_texts(examples, split, hint)
    if split == "train":
        tokenizer, tokens = text_model.tokenizer, int(examples.lengths.sum())
        unknown = encoded.count(tokenizer.unk_token_id)
        advice = suggest_model(tokenizer, texts.joined, unknown_tokens=unknown, tokens=tokens)
        if advice:
            emit(WarningMessage(advice.finding, remedy=advice.remedy))
    return examples


def _encode(texts: TextColumns, text_model: TextModel, config: Config) -> EncodedTexts:
    options = config.model
    return text_model.encode(*texts, max_length=options.max_length, stride=options.window_stride)


def _read_or_encode(
    texts: TextColumns, split: str, text_model: TextModel, config: Config
) -> EncodedTexts:
    """Return token ids from the store. If they are missing, the main rank writes them."""
    store, key = open_tensor_store(config.cache), _key(texts, text_model, config)
    encoded, stored = None, store.read(key)
    if stored is None and distributed.is_main():
        emit(Info(f"encoding {len(texts.texts):,} {split} texts"))
        encoded = _encode(texts, text_model, config)
        arrays = encoded.to_arrays().items()
        try:
            stored = store.write(key, {name: torch.from_numpy(array) for name, array in arrays})
        except OSError as error:
            reason = f"can't be written to {store.folder} ({error.strerror})"
            remedy = "free space with finetune cache clear, or choose a folder with --cache-dir"
            emit(WarningMessage(f"token ids {reason}: they stay in memory", remedy=remedy))
    distributed.barrier()
    stored = stored or store.read(key)
    if stored is None:
        return encoded or _encode(texts, text_model, config)
    empty = _encode(texts.slice(0, 0), text_model, config)
    return empty.with_arrays({name: tensor.numpy() for name, tensor in stored.items()})


def _key(part: TextColumns, text_model: TextModel, config: Config) -> str:
    """Return a key for everything that token ids depend on."""
    digest = hashlib.sha256()
    for column in part.columns:
        update_with_texts(digest, column)
    max_length = min(config.model.max_length, text_model.max_tokens)
    packages = ("tokenizers", "transformers", "finetune-mps")
    return key_of(
        [
            f"{len(part.columns)} columns {digest.hexdigest()}",
            f"tokenizer {text_model.source.tokenizer_sha256}",
            f"max_length {max_length}, stride {config.model.window_stride}",
            *(f"{name} {version(name)}" for name in packages),
        ]
    )


def _report_long_texts(examples: Examples, split: str, hint: str) -> None:
    """Warn about truncated texts; report into how many windows other texts are cut."""
    texts, longer = len(examples.labels), examples.truncated_texts
    if examples.windows:
        longer = int(np.count_nonzero(examples.windows.counts > 1))
    message = f"{longer:,} of the {texts:,} {split} texts ({longer / texts:.1%}) are longer than "
    message += f"{examples.lengths.max()} tokens"
    if examples.windows:
        emit(Info(f"{message}: {len(examples.lengths):,} windows in all"))
    elif longer:
        remedy = f"if the rest matters, {hint}"
        emit(WarningMessage(f"{message} and are truncated", remedy=remedy))
