"""BERT-base with random weights, and texts of random tokens as long as real ones."""

import copy
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import PreTrainedModel

from finetune.bench.workload import Batch
from finetune.errors import DataNotFound
from finetune.model.shape import random_classifier
from finetune.model.structure import Structure, find_structure
from finetune.tokenization.encode import EncodedTexts, random_texts
from finetune.tokenization.examples import collate

CLASSES = 6
SEED = 0
TREC_FILE = "train_5500.label"
# Of a token's forward: 2 for each of the 85.6 million weights of the layers.
GIGAFLOPS_A_TOKEN = 0.1712
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
    return [_count_tokens(text) for text in _read_texts(data_dir)]


def _read_texts(data_dir: Path | None) -> list[str]:
    if data_dir is None:
        lines = files("finetune.data").joinpath("questions.jsonl").read_text("utf-8").splitlines()
        return [row["text"] for row in map(json.loads, lines) if row["split"] == "train"]
    file = data_dir.expanduser() / TREC_FILE
    try:
        lines = file.read_text("latin-1").splitlines()
    except OSError as error:
        raise DataNotFound(
            f"{file} can't be read: {error.strerror}",
            remedy="name TREC's folder with --data-dir, or leave it out",
        ) from error
    return [line.partition(" ")[2] for line in lines]


def _count_tokens(text: str) -> int:
    words = [word for word, _ in BertPreTokenizer().pre_tokenize_str(text)]
    return _SPECIAL_TOKENS + sum(1 + (len(word) > _MAX_WHOLE_WORD) for word in words)


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


def text_batch(lengths: Sequence[int] | NDArray[np.int64], *, padded_length: int) -> Batch:
    """Return texts as transformers' BERT takes them: token ids, mask of 1 and 0, classes."""
    rows = torch.arange(len(lengths))
    batch = collate(texts_of(lengths), rows.numpy(), padded_length=padded_length)
    return {**batch, "attention_mask": batch["attention_mask"].long(), "labels": rows % CLASSES}


def repeat(lengths: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Return the lengths of so many rows, from the first on, again where there are fewer."""
    return np.resize(np.asarray(lengths, np.int64), rows)
