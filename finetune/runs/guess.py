"""Guesses unset options from the table: columns, model, length, task."""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.load import LoadedConfig
from finetune.config.schema import OPTIONS, Config, DataConfig, ModelConfig, change_options, flag_of
from finetune.errors import FinetuneError
from finetune.events import Event, Guess, Info, WarningMessage, emit, muted, sent_to
from finetune.files import is_there

if TYPE_CHECKING:
    import pyarrow

    from finetune.data.check import Lengths
    from finetune.data.dataset import KnownTokens, LoadedData, Splits
    from finetune.tokenization.encode import EncodedTexts

UNLIMITED = 2**31 - 1
# To estimate lengths without a tokenizer. BERT has 3.8 bytes per token on TREC, and 3 bytes (one
# character) in Chinese. An estimate that is too high does no harm.
BYTES_PER_TOKEN = 3
SPECIAL_TOKENS = 2
# Positions of BERT and most similar models.
MAX_TOKENS = 512
# In large tables, only a random sample of texts and the longest texts are tokenized.
SAMPLE_TEXTS = 20_000
LONGEST_TEXTS = 20
SCRIPT_CHARACTERS = 100_000
# English text has hardly any accents, and about 10% of its words are among these.
ENGLISH_WORDS = frozenset(("the", "and", "of", "you", "that", "this", "with", "for", "my", "what"))
MIN_ENGLISH, MAX_MARKED = 0.03, 0.003
# With more, plain fine-tuning is as good as few-shot training and takes less time
# (docs/measurements.md#few-labels).
MAX_ROWS_PER_CLASS = 100
# Trained on text pairs in 94 languages, like MiniLM in English. The 50 languages of
# paraphrase-multilingual-MiniLM-L12-v2 lack Bengali, Tamil and Swahili. With 8 rows per class of
# MASSIVE intents, the MTEB results list 55.5% against 50.7% in German, 51.1% against 52.5% in
# Hebrew. It was trained with the prefix "query: ". Without it, as here, it is better on TREC
# (docs/measurements.md#few-labels).
MULTILINGUAL_SENTENCE_ENCODER = "intfloat/multilingual-e5-small"
# Scripts on which multilingual BERT was not trained: Amharic, Khmer, Lao, Odia and Sinhala.
XLM_SCRIPTS = frozenset(("ETHIOPIC", "KHMER", "LAO", "ORIYA", "SINHALA"))


class Guesses(NamedTuple):
    """Guessed options. ``longer_fraction`` of the texts exceed the model's maximum length.

    ``model_reason`` is empty if the model was set.
    """

    values: Mapping[str, Any]
    longer_fraction: float
    model_reason: str
    tokens: "KnownTokens | None" = None


@dataclass(frozen=True)
class GuessedConfig(LoadedConfig):
    """A configuration with guessed options, and the data that was read to guess them."""

    guesses: tuple[str, ...] = ()
    read: "LoadedData | None" = None


def guess(table: "LoadedData", options: DataConfig, *, model: str | None) -> Guesses:
    """Guess options for a table. Without a tokenizer, estimate lengths in tokens."""
    import numpy as np
    import pyarrow
    import pyarrow.compute as pc

    from finetune.data.check import suggest_max_length
    from finetune.data.dataset import KnownTokens, held_out_fractions, texts_of

    rows, task, known, reason = table.splits["train"], table.task.name, None, ""
    held_out = sum(held_out_fractions(table.splits, options, task=table.task).values())
    trained = min(len(rows) * (1 - held_out), options.max_train_samples or len(rows))
    rows_per_class = trained / max(len(table.task.class_names), 1)
    # Sentence encoders are for few-shot training, which only single-label tasks have.
    has_few_rows = task == "single" and rows_per_class <= MAX_ROWS_PER_CLASS
    if has_few_rows and table.unlabeled is not None:
        # Few-shot training reads unlabeled texts too. Without labels, the rows are only class
        # names.
        names = table.unlabeled.column_names
        rows = pyarrow.concat_tables([table.unlabeled, rows.select(names)])
    texts = texts_of(rows).joined
    if model is None:
        model = suggest_encoder(texts, has_few_rows=has_few_rows)
        limit = f"{'at most' if has_few_rows else 'more than'} {MAX_ROWS_PER_CLASS} rows per class"
        reason = f"{limit} on average: {rows_per_class:,.0f}"
        if task != "single":
            reason = f"the task is {task}"
        elif not table.has_labels:
            reason = "the data has no labels"
    size_bytes = pc.binary_length(texts).to_numpy()
    if (count := len(rows)) > SAMPLE_TEXTS:
        emit(Info(f"counting tokens in the longest and {SAMPLE_TEXTS:,} random texts of {count:,}"))
        is_chosen = np.zeros(count, dtype=bool)
        is_chosen[np.random.default_rng(0).choice(count, SAMPLE_TEXTS, replace=False)] = True
        is_chosen[np.argsort(size_bytes)[-LONGEST_TEXTS:]] = True
        rows = rows.filter(is_chosen)
    if measured := measure_tokens({"train": rows}, ModelConfig(model=model)):
        lengths, encoded = measured
        suggested, longer = lengths.suggested_max_length, lengths.beyond_model / len(rows)
        if len(rows) == count:
            known = KnownTokens(model, texts, encoded["train"])
    else:
        tokens = size_bytes // BYTES_PER_TOKEN + SPECIAL_TOKENS
        longer = float((tokens > MAX_TOKENS).mean())
        suggested = suggest_max_length(tokens, max_tokens=MAX_TOKENS)
    values = {
        **{option: column.name for option, column in table.chosen.items()},
        **({} if task == "single" else {"task": task}),
        "model": model,
        "max_length": max(suggested, ModelConfig.max_length),
    }
    return Guesses(values, longer, reason, known)


def guess_options(loaded: LoadedConfig) -> GuessedConfig:
    """Add guesses for a table to the options, like ``init``, and report them."""
    from finetune.data.load import load_data

    data = loaded.config.data
    is_table = data.data not in OPTIONS["data"].names and is_there(Path(data.data).expanduser())
    if not is_table or loaded.sources.get("data") != flag_of("data"):
        return GuessedConfig(loaded.config, loaded.sources)
    emit(Info(f"reading {data.data} to guess options"))
    model = loaded.config.model.model if "model" in loaded.sources else None
    events: list[Event] = []
    with sent_to(events.append):
        table = load_data(data)
    with muted():
        values, _, reason, tokens = guess(table, data, model=model)
    changed = {
        name: values[name]
        for name, option in OPTIONS.items()
        if name not in loaded.sources
        if name == "model" or values.get(name, option.default) != option.default
    }
    shown = {**changed, "model": f"{values['model']} ({reason})", **table.chosen}
    for name in changed:
        emit(Info(f"guessed: {flag_of(name)} {shown[name]}"))
    others = [event for event in events if not isinstance(event, Guess)]
    read = replace(table, events=others, tokens=tokens)
    config = change_options(loaded.config, changed)
    return GuessedConfig(config, loaded.sources, tuple(changed), read)


def measure_tokens(
    splits: "Splits", options: ModelConfig
) -> "tuple[Lengths, dict[str, EncodedTexts]] | None":
    """Return a summary of text lengths, and the token IDs of the whole texts.

    Return None and warn without a tokenizer.
    """
    from finetune.data.check import Lengths, describe_lengths, suggest_max_length, suggest_model
    from finetune.data.dataset import texts_of
    from finetune.model.source import find_model
    from finetune.tokenization.encode import encode_texts

    emit(Info(f"counting tokens with the {options.model} tokenizer"))
    try:
        source = find_model(options.model, revision=options.revision, with_weights=False)
        tokenizer = source.read_tokenizer()
    except FinetuneError as error:
        warning = f"the lengths of the texts are unknown: {error.message}"
        emit(WarningMessage(warning, remedy=error.remedy))
        return None
    encoded = {
        split: encode_texts(tokenizer, *texts_of(rows), max_length=UNLIMITED)
        for split, rows in splits.items()
    }
    lengths, max_tokens = encoded["train"].lengths, tokenizer.model_max_length
    unknown, tokens = encoded["train"].count(tokenizer.unk_token_id), int(lengths.sum())
    texts = texts_of(splits["train"]).joined
    if suggestion := suggest_model(tokenizer, texts, unknown_tokens=unknown, tokens=tokens):
        emit(suggestion)
    suggested = suggest_max_length(lengths, max_tokens=max_tokens)
    described = Lengths(
        model=options.model,
        max_length=options.max_length,
        suggested_max_length=suggested,
        beyond_suggested=int((lengths > suggested).sum()),
        beyond_model=int((lengths > max_tokens).sum()),
        unknown_share=unknown / tokens,
        splits={
            split: describe_lengths(texts.lengths, max_length=options.max_length)
            for split, texts in encoded.items()
        },
    )
    return described, encoded


def suggest_encoder(texts: "pyarrow.ChunkedArray", *, has_few_rows: bool) -> str:
    """Return the default model for the number of rows, the script and the language.

    For few rows, it is an encoder trained to compare texts.
    """
    from finetune.data.check import MULTILINGUAL_MODEL, SCRIPT_TEXTS
    from finetune.model.source import MINILM

    first = " ".join(texts[:SCRIPT_TEXTS].to_pylist())[:SCRIPT_CHARACTERS]
    letters, words = list(filter(str.isalpha, first)), first.lower().split()
    scripts = Counter(unicodedata.name(letter, "").split(" ")[0] for letter in letters)
    script = max(scripts, key=scripts.__getitem__, default="LATIN")
    if script == "LATIN":
        has_marks = sum(map(str.isascii, letters)) < (1 - MAX_MARKED) * len(letters)
        is_english = sum(map(ENGLISH_WORDS.__contains__, words)) >= MIN_ENGLISH * len(words)
        if is_english or not has_marks:
            return MINILM if has_few_rows else Config().model.model
    if has_few_rows:
        return MULTILINGUAL_SENTENCE_ENCODER
    if script == "CJK" and not scripts.keys() & {"HIRAGANA", "KATAKANA", "HANGUL"}:
        return "bert-base-chinese"
    return "xlm-roberta-base" if script in XLM_SCRIPTS else MULTILINGUAL_MODEL
