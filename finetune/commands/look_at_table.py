"""A first configuration for a table, from a quick look at what the table holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.commands.check_data import NOT_CUT, find_tokenizer, warn_of_unknown_words
from finetune.config.mode import Mode
from finetune.config.schema import (
    DEFAULT_BATCH_SIZE,
    Config,
    DataConfig,
    ModelConfig,
    mode_defaults,
)
from finetune.config.yaml_files import make_starter
from finetune.data.check import suggest_max_length
from finetune.data.dataset import TextColumns, column_of, texts_of
from finetune.data.source import DataOptions, LoadedData
from finetune.data.split import split_table
from finetune.data.tables import read_tables
from finetune.events import Emit, Info
from finetune.runs.data import split_options
from finetune.tasks.single import Single
from finetune.tokenization.encode import encode_texts

# An estimate that is high rather than low, and free of a tokenizer: BERT's takes 3.8 bytes of
# TREC's questions a token, and of Chinese a character, which is 3. A limit that is too high costs
# nothing, for batches are no wider than their texts.
BYTES_A_TOKEN = 3
SPECIAL_TOKENS = 2
# The default model's vocabulary is of English.
MULTILINGUAL_MODEL = "bert-base-multilingual-cased"
FIRST_LETTER_BEYOND_LATIN = "\u0250"
SCRIPT_TEXTS = 1000
# The first are drawn; the others, by their bytes, are too few to move the shares of lengths.
SAMPLE_TEXTS = 20_000
MAX_TEXTS = 20
# The positions of BERT and of most of its kin.
MAX_TOKENS = 512


@dataclass(frozen=True)
class TableFacts:
    """What a table holds.

    Args:
        options: The file, and what of it is not to be guessed.
        columns: The names of its columns.
        text_column: The one that holds the texts.
        text_reason: Why it is that one.
        text_pair_column: The one of the second texts, if the rows are pairs.
        label_column: The one that holds the classes.
        label_reason: Why it is that one.
        rows_of_a_run: Rows of each split that a run makes of the table.
        task: The kind of the labels.
        rows: How many have a text and a label.
        label_figures: Other figures of the labels by name.
        class_rows: Rows of each class, in the order of the classes.
        examples: The first text of each class.
        mean_characters: Characters of a text on average.
        longest_characters: Characters of the longest text.
        model: The model that was named, or one whose vocabulary suits the texts.
        suggested_max_length: Tokens that are enough for the texts, or an estimate.
        longer_share: About how many of the texts are longer than the model reads at once, in 0..1.
    """

    options: DataOptions
    columns: Sequence[str]
    text_column: str
    text_reason: str
    text_pair_column: str | None
    label_column: str
    label_reason: str
    rows_of_a_run: Mapping[str, int]
    task: str
    rows: int
    class_rows: Mapping[str, int]
    label_figures: Mapping[str, float]
    examples: Mapping[str, str]
    mean_characters: float
    longest_characters: int
    model: str
    suggested_max_length: int
    longer_share: float


def look_at_table(options: DataOptions, *, model: str | None, emit: Emit) -> TableFacts:
    """Read a file as a run would, and say what it holds.

    Args:
        options: A file, and what of it is not to be guessed.
        model: Whose tokenizer counts; ``None`` for the default. Without one, tokens are estimated.
        emit: Receives progress events.

    Raises:
        DataError: If a run could not use the file.
        UsageError: If both names are the same.
    """
    table = read_tables({"train": [Path(options.data)]}, options, emit=emit)
    columns = table.chosen
    assert columns is not None
    rows, task = table.splits["train"], table.task
    texts = texts_of(rows)
    shown = texts.joined
    characters = pc.utf8_length(shown)
    labels = task.labels(column_of(rows, "label"))
    model = model or _suggest_model(shown)
    lengths, max_tokens = _count_tokens(texts, model, emit=emit)
    return TableFacts(
        options=options,
        columns=table.column_names,
        text_column=columns.text.name,
        text_reason=columns.text.reason,
        text_pair_column=columns.pair.name if columns.pair else None,
        label_column=columns.label.name,
        label_reason=columns.label.reason,
        rows_of_a_run=_count_rows_of_a_run(table, emit=emit),
        task=task.name,
        rows=len(rows),
        class_rows=task.count_classes(labels),
        label_figures=task.describe(labels),
        examples={name: shown[row].as_py() for name, row in task.first_rows(labels).items()},
        mean_characters=pc.mean(characters).as_py(),
        longest_characters=pc.max(characters).as_py(),
        model=model,
        suggested_max_length=suggest_max_length(lengths, max_tokens=max_tokens),
        longer_share=float(np.mean(lengths > max_tokens)),
    )


def make_config(facts: TableFacts) -> str:
    """Return a YAML configuration for a table, with comments, that runs as it is."""
    defaults, options = Config(), facts.options
    given = {
        "encoding": options.encoding,
        "header": options.header,
        "split_column": options.split_column,
        "label_names": options.label_names,
        "text_pair_column": facts.text_pair_column,
        "task": None if facts.task == Single.name else facts.task,
    }
    values = {
        **{option: value for option, value in given.items() if value is not None},
        "data": options.data,
        "text_column": facts.text_column,
        "label_column": facts.label_column,
        "model": facts.model,
        "freeze_core": defaults.model.freeze_core,
        "max_length": max(facts.suggested_max_length, defaults.model.max_length),
        "num_train_epochs": defaults.training.num_train_epochs,
        "batch_size": defaults.training.batch_size,
    }
    if facts.longer_share and not facts.text_pair_column:
        values["long_texts"] = defaults.model.long_texts
    if facts.class_rows:
        values["class_weights"] = defaults.training.class_weights
    heading = (
        f"Written by `finetune init` for a table of {facts.rows:,} rows. An "
        "option behind a # has its default; `finetune run --help` explains all of them."
    )
    return make_starter(values, notes=_notes(facts), heading=heading)


def _notes(facts: TableFacts) -> dict[str, str]:
    """Return what the table adds to the help of an option."""
    rows = [count for count in facts.class_rows.values() if count] or [facts.rows]
    return {
        "data": "A path that is not absolute counts from the folder in which finetune runs.",
        "max_length": (
            f"Here a text has {facts.mean_characters:,.0f} characters on average and "
            f"{facts.longest_characters:,} at most; a token is about 4 of English, 1 of Chinese."
        ),
        "long_texts": (
            f"Here about {facts.longer_share:.1%} of the texts are longer than the model reads at "
            "once."
        ),
        "num_train_epochs": (
            f"Here it is {_epochs(facts, 'full'):g}, or at most {_epochs(facts, 'head'):g} where "
            "only the head trains."
        ),
        "class_weights": (
            f"Here the smallest class has {min(rows):,} rows and the largest {max(rows):,}: "
            "balanced finds more of the small classes"
            + (
                " and costs accuracy, on two tables 4 and 17 points."
                if facts.task == Single.name
                else "."
            )
        ),
    }


def _epochs(facts: TableFacts, mode: str) -> float:
    """Return the default number of epochs for a table."""
    steps_per_epoch = math.ceil(facts.rows_of_a_run["train"] / DEFAULT_BATCH_SIZE)
    return mode_defaults(Mode(mode), steps_per_epoch=steps_per_epoch).num_train_epochs


def _count_rows_of_a_run(table: LoadedData, *, emit: Emit) -> dict[str, int]:
    splits = split_table(
        table.splits,
        split_options(DataConfig()),
        task=table.task,
        takes_first=False,
        emit=emit,
    )
    return {split: len(rows) for split, rows in splits.items()}


def _suggest_model(texts: pyarrow.ChunkedArray) -> str:
    """Return the default model or, for texts not in Latin letters, a multilingual one."""
    first = texts[:SCRIPT_TEXTS].to_pylist()
    letters = [letter for text in first for letter in text if letter.isalpha()]
    latin = sum(letter < FIRST_LETTER_BEYOND_LATIN for letter in letters)
    return MULTILINGUAL_MODEL if 2 * latin < len(letters) else Config().model.model


def _count_tokens(texts: TextColumns, model: str, *, emit: Emit) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of texts, or of a sample of many, and the most that a model reads at once.

    Without a tokenizer they are an estimate.
    """
    size_bytes = pc.binary_length(texts.joined).to_numpy().astype(np.int64)
    tokenizer = find_tokenizer(ModelConfig(model=model), emit=emit)
    if tokenizer is None:
        return size_bytes // BYTES_A_TOKEN + SPECIAL_TOKENS, MAX_TOKENS
    if len(size_bytes) > SAMPLE_TEXTS:
        emit(Info(f"in {SAMPLE_TEXTS:,} of the {len(size_bytes):,} texts, and in the longest"))
        rows = np.random.default_rng(0).choice(len(size_bytes), SAMPLE_TEXTS, replace=False)
        longest = np.argsort(size_bytes)[-MAX_TEXTS:]
        texts = texts.take(np.sort(np.append(rows, longest)))
    encoded = encode_texts(tokenizer, *texts, max_length=NOT_CUT, emit=emit)
    warn_of_unknown_words(encoded, tokenizer, emit=emit)
    return encoded.lengths, tokenizer.model_max_length
