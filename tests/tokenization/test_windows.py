import numpy as np
import pytest
from tiny_models import COMMON_WORDS, tiny_tokenizer

from finetune.tokenization import encode
from finetune.tokenization.encode import EncodedTexts, Windows, encode_texts

WORDS = COMMON_WORDS.split()
TEXTS = [" ".join(WORDS[:count]) for count in (5, 41, 1, 30, 8)] + [""]


def parts_of(encoded: EncodedTexts) -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.columns["input_ids"], encoded.offsets[1:-1])]


def test_windows_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_tokenizer()(
        TEXTS, truncation=True, max_length=10, stride=3, return_overflowing_tokens=True
    )
    monkeypatch.setattr(encode, "TEXTS_PER_CALL", 4)
    monkeypatch.setattr(encode, "CHARACTERS_PER_CALL", 60)

    encoded = encode_texts(tiny_tokenizer(), TEXTS, max_length=10, stride=3)

    assert parts_of(encoded) == expected.input_ids
    assert encoded.windows is not None
    owners = np.repeat(np.arange(len(TEXTS)), encoded.windows.counts)
    assert owners.tolist() == expected["overflow_to_sample_mapping"]
    assert encoded.truncated_texts == 0


def test_logits_of_a_text_are_the_mean_of_its_windows_logits() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    averaged = Windows(np.array([2, 1, 3])).average(logits)
    expected = np.stack([part.mean(axis=0) for part in np.split(logits, [2, 3])])
    np.testing.assert_allclose(averaged, expected, rtol=1e-6)
    assert averaged.dtype == np.float32
