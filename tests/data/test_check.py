"""Checks that find problems in the data."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import PreTrainedTokenizerFast

from finetune.data.check import (
    Lengths,
    check_splits,
    describe_lengths,
    find_imbalance,
    suggest_changes,
    suggest_max_length,
    suggest_model,
)
from finetune.data.dataset import make_dataset
from finetune.tasks.single import Single


def checked(**rows: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    task = Single(sorted({label for pairs in rows.values() for _, label in pairs}))
    splits = {
        split: make_dataset(*zip(*pairs, strict=True), task=task) for split, pairs in rows.items()
    }
    return check_splits(splits, task)


def rows_of(texts: list[str], labels: str) -> list[tuple[str, str]]:
    return list(zip(texts, labels, strict=True))


def test_repeated_texts_are_counted_exactly_and_up_to_case() -> None:
    texts = ["Who?", "What?", "Who?", "who ?", "WHO?", "Who?", "what?"]
    assert checked(train=rows_of(texts, "aaaaaab"))["repeats"]["train"] == {
        **{"rows": 2, "texts": 1, "rows_up_to_case": 4, "texts_up_to_case": 2},
        "examples": ["Who?", "What?"],
    }


def test_text_with_different_labels_is_a_conflict() -> None:
    texts = ["Why?", "Who?", "who? ", "What?", "What?", "How?", "HOW?"]
    assert checked(train=rows_of(texts, "dbaccef"))["conflicts"]["train"] == {
        "texts": 2,
        "examples": [
            {"text": "Who?", "labels": ["a", "b"]},
            {"text": "How?", "labels": ["e", "f"]},
        ],
    }


def test_training_rows_in_the_test_split_are_reported_with_both_labels() -> None:
    train = [
        ("What are the twin cities ?", "DESC"),
        ("Who is  it ?", "HUM"),
        ("Who is it ?", "DESC"),
    ]
    test = [("who is it ?", "HUM"), ("What are the Twin Cities ?", "LOC"), ("When ?", "NUM")]
    assert checked(train=train, test=test)["overlap"]["test"] == {
        "rows": 2,
        "disagreeing": 1,
        "examples": [
            {"text": "What are the Twin Cities ?", "label": "LOC", "train_labels": ["DESC"]},
            {"text": "who is it ?", "label": "HUM", "train_labels": ["DESC", "HUM"]},
        ],
    }


def test_largest_class_is_compared_with_the_smallest_nonempty_class() -> None:
    assert [*find_imbalance({"a": 0, "b": 0})] == []
    large, rare = (one.message for one in find_imbalance({"a": 60, "b": 4, "c": 0, "d": 10}))
    assert large == "a has 15.0 times the training rows of b"
    assert rare.endswith("rows: 'b' (4), 'c' (0)")


@pytest.mark.parametrize(
    ("lengths", "suggested"),
    [([13, 22, 48], 48), ([20] * 1000 + [39], 40), ([20] * 1000 + [400], 24), ([700] * 10, 512)],
)
def test_suggested_length_truncates_only_a_long_tail(lengths: list[int], suggested: int) -> None:
    assert suggest_max_length(np.array(lengths), max_tokens=512) == suggested


def even_rows(count: int = 10) -> list[tuple[str, str]]:
    return [(f"text {number}", "ab"[number % 2]) for number in range(2 * count)]


@pytest.mark.parametrize(
    ("train", "test", "remedy"),
    [
        ([*even_rows(), ("text 0", "b")], [], "choose one label"),
        (even_rows(), [("text 0", "b")], "remove them from train"),
        ([*even_rows(), ("more 1", "c"), ("more 2", "c")], [], "add rows"),
    ],
)
def test_each_problem_has_a_remedy(
    train: list[tuple[str, str]], test: list[tuple[str, str]], remedy: str
) -> None:
    findings = checked(train=train, test=[("another text", "a"), *test])
    lengths = Lengths(
        model="tiny",
        max_length=8,
        suggested_max_length=8,
        beyond_suggested=0,
        beyond_model=0,
        unknown_share=0.0,
        splits={"train": describe_lengths(np.array([8]), max_length=8)},
    )
    [change] = suggest_changes(findings, lengths=lengths)
    assert change.remedy.startswith(remedy)


def letter_tokenizer(*scripts: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary contains these words and the letters of these scripts."""
    pieces = [*"".join(scripts), *(f"##{one}" for one in "".join(scripts)), *words]
    vocabulary = {one: number for number, one in enumerate(dict.fromkeys(["[UNK]", *pieces]))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.mark.parametrize(
    "text", ["фильм мне понравился", "η ταινία ήταν καλή", "영화가 재미있었어요", "फिल्म बहुत अच्छी"]
)
def test_vocabulary_of_single_letters_suggests_a_different_model(text: str) -> None:
    texts = pyarrow.chunked_array([[text] * 3])
    found = suggest_model(letter_tokenizer(text), texts, unknown_tokens=0, tokens=100)
    assert found is not None
    assert "only single letters" in found.message
    assert found.remedy.startswith("use --model bert-base-multilingual-cased")
    tokenizer = letter_tokenizer(text, words=text.split())
    assert suggest_model(tokenizer, texts, unknown_tokens=0, tokens=100) is None


@pytest.mark.parametrize(
    "text",
    ["the film was good", "😀 “a” 😀 “b” fine", "今天天气很好", "映画はとてもよかった", "12 !", ""],
)
def test_latin_words_and_unspaced_scripts_may_be_split_into_letters(text: str) -> None:
    texts = pyarrow.chunked_array([[text] * 3])
    assert suggest_model(letter_tokenizer(text), texts, unknown_tokens=0, tokens=100) is None


def test_many_unknown_tokens_suggest_a_different_model() -> None:
    suggest = partial(suggest_model, letter_tokenizer("a"), pyarrow.chunked_array([["a"]]))
    assert suggest(unknown_tokens=5, tokens=100) is None
    assert suggest(unknown_tokens=0, tokens=0) is None
    found = suggest(unknown_tokens=65, tokens=100)
    assert found is not None
    assert found.message.startswith("65% of the tokens are not in")
    assert found.remedy.startswith("use --model ")


def test_footer_words_that_identify_a_class_are_reported() -> None:
    task, labels = Single(["one", "two"]), ["one", "two"] * 40
    texts = [f"question {number // 2} about it" for number in range(80)]

    def find(texts: Sequence[str]) -> list[str]:
        report = check_splits({"train": make_dataset(texts, labels, task=task)}, task)
        return [finding.message for finding in suggest_changes(report, lengths=None)]

    is_signed = [label == "two" and number % 10 for number, label in enumerate(labels)]
    footer = [f"{text}, via Acme portal" * bool(signed) or text
              for text, signed in zip(texts, is_signed, strict=True)]  # fmt: skip
    expected = "words in nearly all texts of 'two' and hardly any others: acme, portal, via"
    assert expected in find(footer)
    assert not any("nearly all texts" in message for message in find(["is it?", *texts[1:]]))
