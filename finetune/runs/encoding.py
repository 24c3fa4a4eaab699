"""Encodes the texts of a split."""

import numpy as np
from datasets import Dataset

from finetune.config.schema import Config
from finetune.data.check import suggest_model
from finetune.data.dataset import column_of, texts_of
from finetune.events import Info, WarningMessage, emit
from finetune.model.load import TextModel
from finetune.tokenization.examples import Examples


def encode_rows(rows: Dataset, split: str, text_model: TextModel, *, config: Config) -> Examples:
    """Encode the texts of a split, with a warning if some are truncated."""
    texts, task, options = texts_of(rows), text_model.task, config.model
    encoded = text_model.encode(*texts, max_length=options.max_length, stride=options.window_stride)
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
    if options.max_length < text_model.max_tokens:
        hint = f"raise --max-length or {hint}"
    _report_long_texts(examples, split, hint)
    if split == "train":
        tokenizer, tokens = text_model.tokenizer, int(examples.lengths.sum())
        unknown = encoded.count(tokenizer.unk_token_id)
        advice = suggest_model(tokenizer, texts.joined, unknown_tokens=unknown, tokens=tokens)
        if advice:
            emit(WarningMessage(advice.finding, remedy=advice.remedy))
    return examples


def _report_long_texts(examples: Examples, split: str, hint: str) -> None:
    """Warn about truncated texts; report into how many windows other texts are split."""
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
