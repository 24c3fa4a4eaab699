import numpy as np
import pyarrow
import pytest
from tiny_models import COMMON_WORDS, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from finetune.tokenization import encode
from finetune.tokenization.encode import EncodedTexts, encode_texts

TEXTS = ["Who wrote the word?", "", "many many many", "unheardof", "city " * 30, "the year"]
CLS, SEP = 2, 3


def tokenizer_with_types() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def tokens_of(encoded: EncodedTexts, column: str = "input_ids") -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.columns[column], encoded.offsets[1:-1])]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_length", [3, 6, 20])
def test_token_ids_and_types_match_transformers(side: str, max_length: int) -> None:
    tokenizer = tokenizer_with_types()
    tokenizer.truncation_side = side
    texts = [*TEXTS, "a [MASK] [SEP] b", "déjà vu \u200b 都", "\x00\ud7ff", " \t\n"]
    expected = tokenizer(texts, truncation=True, max_length=max_length)
    # Earlier calls must not have an effect.
    tokenizer(texts, truncation=True, padding="max_length", max_length=4)

    encoded = encode_texts(tokenizer, texts, max_length=max_length)

    for column in ("input_ids", "token_type_ids"):
        assert tokens_of(encoded, column) == expected[column]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_length", [3, 4, 9, 40])
def test_pairs_are_truncated_like_in_transformers(
    side: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_with_types()
    tokenizer.truncation_side = side
    pairs = ["city " * 12, "the", *TEXTS[:4]]
    expected = tokenizer(TEXTS, pairs, truncation=True, max_length=max_length)
    monkeypatch.setattr(encode, "TEXTS_PER_CALL", 4)

    for given in (pairs, pyarrow.chunked_array([pairs[:1], pairs[1:]])):
        encoded = encode_texts(tokenizer, TEXTS, given, max_length=max_length)

        for column in ("input_ids", "token_type_ids"):
            assert tokens_of(encoded, column) == expected[column]
        whole = tokenizer(TEXTS, pairs).input_ids
        assert encoded.truncated_texts == sum(len(ids) > max_length for ids in whole)


def test_subset_of_encoded_texts_equals_encoding_the_subset() -> None:
    tokenizer = tokenizer_with_types()
    for pairs in (None, TEXTS[::-1]):
        taken = encode_texts(tokenizer, TEXTS, pairs, max_length=99).take(np.array([4, 0, 4, 1]))
        some = [[texts[place] for place in (4, 0, 4, 1)] for texts in (TEXTS, pairs or TEXTS)]
        expected = encode_texts(tokenizer, some[0], pairs and some[1], max_length=99)
        for column in ("input_ids", "token_type_ids"):
            assert tokens_of(taken, column) == tokens_of(expected, column)


WORDS = COMMON_WORDS.split()
LONG_TEXTS = [" ".join(WORDS[:count]) for count in (5, 41, 1, 30, 8)] + [""]


def test_windows_match_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_tokenizer()(
        LONG_TEXTS, truncation=True, max_length=10, stride=3, return_overflowing_tokens=True
    )
    monkeypatch.setattr(encode, "TEXTS_PER_CALL", 4)
    monkeypatch.setattr(encode, "CHARACTERS_PER_CALL", 60)

    encoded = encode_texts(tiny_tokenizer(), LONG_TEXTS, max_length=10, stride=3)

    assert tokens_of(encoded) == expected.input_ids
    assert encoded.windows is not None
    owners = np.repeat(np.arange(len(LONG_TEXTS)), encoded.windows.counts)
    assert owners.tolist() == expected["overflow_to_sample_mapping"]
    assert encoded.truncated_texts == 0
