"""What is odd about the data of a run, and how its texts suit the model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from datasets import DatasetDict
from transformers import PreTrainedTokenizerFast

from finetune.config.schema import Config, ModelConfig
from finetune.data.check import (
    Findings,
    LengthFindings,
    Suggestion,
    check_splits,
    measure_lengths,
    suggest_changes,
    suggest_max_length,
    suggest_model,
)
from finetune.data.dataset import texts_of
from finetune.data.load import load_data
from finetune.data.split import split_table
from finetune.errors import FinetuneError
from finetune.events import Emit, Event, Info, WarningMessage
from finetune.model.source import load_tokenizer
from finetune.runs.data import data_options, split_options
from finetune.tokenization.encode import EncodedTexts, encode_texts

CHECK_SCHEMA_VERSION = 1
NOT_CUT = 2**31 - 1


@dataclass(frozen=True)
class DataReport:
    """What a check of data has found.

    Args:
        data: Name of the data.
        rows_of_a_run: By split, once the missing splits are held out.
        findings: Of the splits that the data has.
        lengths: Of the texts in tokens; None without a tokenizer.
        suggestions: What to change.
        warnings: Of loading.
    """

    data: str
    rows_of_a_run: dict[str, int]
    findings: Findings
    lengths: LengthFindings | None
    suggestions: Sequence[Suggestion]
    warnings: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune data check --json`` prints."""
        report = {**asdict(self), **self.findings.to_json()}
        del report["findings"]
        return {"schema_version": CHECK_SCHEMA_VERSION, **report}


def check_data(config: Config, *, emit: Emit) -> DataReport:
    """Check the data that a run would load, and change nothing.

    Args:
        config: The run's options, of which those of the data and the model's tokenizer count.
        emit: Receives progress events.

    Raises:
        FinetuneError: Of every kind that data can cause.
    """
    warnings: list[str] = []

    def emit_and_keep(event: Event) -> None:
        if isinstance(event, WarningMessage):
            warnings.append(event.message)
        emit(event)

    loaded = load_data(data_options(config.data), emit=emit_and_keep)
    given, task = loaded.splits, loaded.task
    takes_first = config.data.data == "trec"
    splits = split_table(
        given,
        split_options(config.data),
        task=task,
        takes_first=takes_first,
        emit=emit_and_keep,
    )
    given = DatasetDict({split: given[split] for split in splits if split in given})
    findings = check_splits(given, task)
    reads_pairs = "text_pair" in given["train"].column_names
    lengths = measure_tokens(given, config.model, emit=emit_and_keep)
    return DataReport(
        data=config.data.data,
        rows_of_a_run={split: len(rows) for split, rows in splits.items()},
        findings=findings,
        lengths=lengths,
        suggestions=suggest_changes(findings, lengths=lengths, reads_pairs=reads_pairs),
        warnings=warnings,
    )


def measure_tokens(
    splits: DatasetDict, options: ModelConfig, *, emit: Emit
) -> LengthFindings | None:
    """Return the lengths of texts under a model's tokenizer; None without one.

    A vocabulary that lacks many of the words is reported as a warning.
    """
    tokenizer = find_tokenizer(options, emit=emit)
    if tokenizer is None:
        return None
    encoded = {
        split: encode_texts(tokenizer, *texts_of(rows), max_length=NOT_CUT, emit=emit)
        for split, rows in splits.items()
    }
    unknown_share = warn_of_unknown_words(encoded["train"], tokenizer, emit=emit)
    lengths = encoded["train"].lengths
    suggested = suggest_max_length(lengths, max_tokens=tokenizer.model_max_length)
    return LengthFindings(
        model=options.model,
        max_length=options.max_length,
        suggested_max_length=suggested,
        beyond_suggested=int(np.count_nonzero(lengths > suggested)),
        beyond_model=int(np.count_nonzero(lengths > tokenizer.model_max_length)),
        unknown_share=unknown_share,
        splits={
            split: measure_lengths(texts.lengths, max_length=options.max_length)
            for split, texts in encoded.items()
        },
    )


def find_tokenizer(options: ModelConfig, *, emit: Emit) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer that counts tokens, or None, with a warning, if it can't be had."""
    emit(Info(f"counting tokens as {options.model} does"))
    try:
        return load_tokenizer(options.model, revision=options.revision)
    except FinetuneError as error:
        emit(
            WarningMessage(
                f"the lengths of the texts are missing: {error.message}", remedy=error.remedy
            )
        )
        return None


def warn_of_unknown_words(
    encoded: EncodedTexts, tokenizer: PreTrainedTokenizerFast, *, emit: Emit
) -> float:
    """Return the share of tokens that the vocabulary lacks, in 0..1; warn if it is large."""
    unknown_tokens, tokens = encoded.count(tokenizer.unk_token_id), int(encoded.offsets[-1])
    if found := suggest_model(unknown_tokens=unknown_tokens, tokens=tokens):
        emit(WarningMessage(found.finding, remedy=found.remedy))
    return unknown_tokens / tokens
