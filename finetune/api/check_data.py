"""What is odd about the data of a run, and how its texts suit the model."""

from dataclasses import asdict
from typing import Any

from datasets import DatasetDict

from finetune.config.schema import Config, ModelConfig
from finetune.data.check import (
    LengthFindings,
    check_splits,
    measure_lengths,
    suggest_changes,
    suggest_max_length,
)
from finetune.data.load import load_data
from finetune.data.split import split_table
from finetune.data.tables import texts_of
from finetune.errors import FinetuneError
from finetune.events import Emit, Event, Stage, WarningMessage
from finetune.model.load import load_tokenizer
from finetune.runs.preparation import data_options, split_options
from finetune.tokenization.encode import encode_texts

CHECK_SCHEMA_VERSION = 1
NOT_CUT = 2**31 - 1


def check_data(config: Config, *, emit: Emit) -> dict[str, Any]:
    """Load the data that a run would, look at it, and change nothing.

    Args:
        config: The run's options, of which those of the data and the model's tokenizer count.
        emit: Is told what goes on, and if the texts' lengths can't be found out.

    Returns:
        What :func:`finetune.data.check.check_splits` finds in the splits that the data brings;
        ``rows_of_a_run``, by split, once the missing splits are held out; ``lengths``, in tokens,
        or ``None`` without a tokenizer; ``suggestions``; and the ``warnings`` of loading.

    Raises:
        FinetuneError: Of every kind that data can cause.
    """
    warnings: list[str] = []

    def emit_and_keep(event: Event) -> None:
        if isinstance(event, WarningMessage):
            warnings.append(event.message)
        emit(event)

    given = load_data(data_options(config.data), emit=emit_and_keep).splits
    splits = split_table(given, split_options(config.data), emit=emit_and_keep)
    findings = check_splits(given)
    lengths = _measure(given, config.model, emit=emit_and_keep)
    return {
        "schema_version": CHECK_SCHEMA_VERSION,
        "data": config.data.data,
        "rows_of_a_run": {split: len(rows) for split, rows in splits.items()},
        **findings.to_json(),
        "lengths": lengths.to_json() if lengths else None,
        "suggestions": [asdict(found) for found in suggest_changes(findings, lengths=lengths)],
        "warnings": warnings,
    }


def _measure(splits: DatasetDict, options: ModelConfig, *, emit: Emit) -> LengthFindings | None:
    """Return the lengths of the texts under the model's tokenizer, if there is one to be had."""
    emit(Stage(f"counting tokens as {options.model} does"))
    try:
        tokenizer = load_tokenizer(options.model, revision=options.revision)
    except FinetuneError as error:
        emit(
            WarningMessage(
                f"the lengths of the texts are missing: {error.message}", remedy=error.remedy
            )
        )
        return None
    lengths = {
        split: encode_texts(tokenizer, texts_of(rows), max_length=NOT_CUT).lengths
        for split, rows in splits.items()
    }
    return LengthFindings(
        model=options.model,
        max_length=options.max_length,
        suggested_max_length=suggest_max_length(
            lengths["train"], max_tokens=tokenizer.model_max_length
        ),
        splits={
            split: measure_lengths(tokens, max_length=options.max_length)
            for split, tokens in lengths.items()
        },
    )
