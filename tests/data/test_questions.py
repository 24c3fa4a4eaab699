"""The questions that come with the package."""

import re
from collections import Counter

import pytest
from datasets import DatasetDict

from finetune.data.trec import COARSE, load_questions

# Words that questions on different matters share.
FUNCTION_WORDS = (
    "a an the of in on at to for from by with and or is are was were be been being do does did has"
    " have had can could will would should what which who whom whose where when why how it its this"
    " that these those many much as into about there you your i we they their his her he she one if"
    " than"
)


@pytest.fixture(scope="module")
def questions() -> DatasetDict:
    return load_questions().splits


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def test_there_are_enough_of_every_class(questions: DatasetDict) -> None:
    assert questions["train"].features["label"].names == list(COARSE)
    for split, least in (("train", 120), ("test", 40)):
        counts = Counter(questions[split]["label"])
        assert len(counts) == len(COARSE)
        assert set(counts.values()) == {counts[0]}
        assert counts[0] >= least


def test_the_first_rows_are_of_all_classes(questions: DatasetDict) -> None:
    for split in questions.values():
        assert len(set(split["label"][:40])) == len(COARSE)


def test_they_read_as_questions(questions: DatasetDict) -> None:
    for split in questions.values():
        for text in split["text"]:
            assert text == " ".join(text.split())
            assert 3 <= len(words_of(text)) <= 30


def test_none_is_repeated(questions: DatasetDict) -> None:
    texts = [" ".join(words_of(text)) for split in questions.values() for text in split["text"]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("left_out", ["", FUNCTION_WORDS], ids=["all words", "content words"])
def test_no_question_of_the_test_split_resembles_one_to_train(
    questions: DatasetDict, left_out: str
) -> None:
    sides = [
        [(text, set(words_of(text)) - set(left_out.split())) for text in questions[split]["text"]]
        for split in ("train", "test")
    ]
    resembling = [
        (text, other)
        for text, words in sides[1]
        for other, other_words in sides[0]
        if len(words & other_words) * 2 >= len(words | other_words)
    ]
    assert resembling == []
