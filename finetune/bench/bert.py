"""BERT-base with random weights, and texts of random tokens as long as real ones."""

import copy
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import PreTrainedModel

from finetune.errors import DataNotFound
from finetune.model.shape import random_classifier
from finetune.model.structure import Structure, find_structure
from finetune.tokenization.encode import EncodedTexts, random_texts

CLASSES = 6
SEED = 0
TREC_FILE = "train_5500.label"
# BERT's vocabulary cuts most words that are longer. Counted twice, they make 13.2 tokens a row of
# TREC's first thousand, where its tokenizer makes 13.4; of the questions 12.9 and 13.0.
_MAX_WHOLE_WORD = 8
_SPECIAL_TOKENS = 2


def read_lengths(data_dir: Path | None) -> list[int]:
    """Return the tokens of TREC's training rows, without a folder of the questions shipped here.

    They are counted without BERT's vocabulary, which may not be at hand.

    Raises:
        DataNotFound: If the folder does not hold TREC's raw training file.
    """
    if data_dir is None:
        lines = files("finetune.data").joinpath("questions.jsonl").read_text("utf-8").splitlines()
        texts = [row["text"] for row in map(json.loads, lines) if row["split"] == "train"]
    else:
        file = data_dir.expanduser() / TREC_FILE
        try:
            lines = file.read_text("latin-1").splitlines()
        except OSError as error:
            raise DataNotFound(
                f"{file} can't be read: {error.strerror}",
                remedy="name TREC's folder with --data-dir, or leave it out",
            ) from error
        texts = [line.partition(" ")[2] for line in lines]
    splitter = BertPreTokenizer()
    words_of_texts = ([word for word, _ in splitter.pre_tokenize_str(text)] for text in texts)
    return [
        _SPECIAL_TOKENS + sum(1 + (len(word) > _MAX_WHOLE_WORD) for word in words)
        for words in words_of_texts
    ]


def bert_base() -> PreTrainedModel:
    """Return BERT-base for six classes on the CPU, a new one with the same weights each time."""
    return copy.deepcopy(_random_bert())


@cache
def bert_structure() -> Structure:
    """Return the structure of all that ``bert_base`` returns."""
    return find_structure(_random_bert())


@cache
def _random_bert() -> PreTrainedModel:
    return random_classifier("bert-base-uncased", classes=CLASSES, seed=SEED)


def texts_of(lengths: Sequence[int] | NDArray[np.int64]) -> EncodedTexts:
    """Return texts of random tokens for BERT, so many of each."""
    return random_texts(
        np.asarray(lengths, np.int64),
        vocabulary_size=_random_bert().config.vocab_size,
        padding_id=0,
        seed=SEED,
    )
