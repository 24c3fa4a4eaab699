import numpy as np
import pytest
import torch
from tiny_models import COMMON_WORDS, tiny_tokenizer

from finetune.tokenization import Aggregation, LongTexts, encode
from finetune.tokenization.encode import EncodedTexts, encode_texts
from finetune.tokenization.examples import ModelInputs
from finetune.tokenization.windows import AGGREGATIONS, Windows

WORDS = COMMON_WORDS.split()
TEXTS = [" ".join(WORDS[:count]) for count in (5, 41, 1, 30, 8)] + [""]
WINDOWS = LongTexts("windows", stride=3, aggregation="mean")


def parts_of(encoded: EncodedTexts) -> list[list[int]]:
    return [part.tolist() for part in np.split(encoded.columns["input_ids"], encoded.offsets[1:-1])]


def test_windows_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny_tokenizer()(
        TEXTS, truncation=True, max_length=10, stride=3, return_overflowing_tokens=True
    )
    monkeypatch.setattr(encode, "TEXTS_A_CALL", 4)
    monkeypatch.setattr(encode, "CHARACTERS_A_CALL", 60)

    encoded = encode_texts(tiny_tokenizer(), TEXTS, max_length=10, long_texts=WINDOWS)

    assert parts_of(encoded) == expected.input_ids
    assert encoded.windows is not None
    owners = np.repeat(np.arange(len(TEXTS)), encoded.windows.counts)
    assert owners.tolist() == expected["overflow_to_sample_mapping"]
    assert encoded.truncated_texts == 0


@pytest.mark.parametrize("max_length", [3, 8, 12])
def test_head_and_tail_are_a_quarter_and_the_rest(max_length: int) -> None:
    whole = parts_of(encode_texts(tiny_tokenizer(), TEXTS, max_length=100))
    head = max_length // 4 + 1

    encoded = encode_texts(
        tiny_tokenizer(), TEXTS, max_length=max_length, long_texts=LongTexts("head-tail", 0, "mean")
    )

    assert parts_of(encoded) == [
        one if len(one) <= max_length else one[:head] + one[head - max_length :] for one in whole
    ]
    assert encoded.truncated_texts == sum(len(one) > max_length for one in whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_logits_of_windows_become_those_of_their_texts_in_training_and_evaluation(
    aggregation: Aggregation,
) -> None:
    counts = np.array([2, 1, 3])
    logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    members = torch.from_numpy(np.repeat(np.arange(3), counts) == np.arange(3)[:, None])

    of_all = Windows(counts, aggregation).aggregate(logits)
    of_batch = AGGREGATIONS[aggregation](torch.from_numpy(logits), members)

    reduce = getattr(np, aggregation)
    expected = np.stack([reduce(part, axis=0) for part in np.split(logits, [2, 3])])
    np.testing.assert_allclose(of_all, expected, rtol=1e-6)
    np.testing.assert_allclose(of_batch.numpy(), expected, rtol=1e-6)
    assert of_all.dtype == np.float32


def test_windows_and_longest_windows_of_texts_are_found() -> None:
    windows = Windows(np.array([2, 1, 3]), "mean")
    lengths = np.array([9, 4, 7, 9, 9, 3])
    inputs = ModelInputs(lambda indices, padded_length: {}, lengths, windows=windows)

    assert inputs.sequences_of(np.array([2, 0])).tolist() == [3, 4, 5, 0, 1]
    assert inputs.max_lengths.tolist() == [9, 7, 9]
