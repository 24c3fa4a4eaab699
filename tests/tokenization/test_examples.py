from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import tiny_tokenizer
from tiny_training import FewShapesDevice

from finetune.devices.base import BatchShapes, Device
from finetune.devices.cpu import CpuDevice
from finetune.tokenization.encode import encode_texts
from finetune.tokenization.examples import (
    Batch,
    choose_padded_lengths,
    collate,
    longest_first,
    plan_epoch,
    plan_evaluation,
)

TEXTS = ["who wrote the word", "", "how far", "the longest river of the country"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_padded_like_by_the_tokenizer(side: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    indices = np.array([2, 0, 3])

    tensors = collate(encode_texts(tokenizer, TEXTS, max_length=20), indices, padded_length=11)

    expected = tokenizer(
        [TEXTS[index] for index in indices],
        padding="max_length",
        max_length=11,
        return_tensors="pt",
    )
    assert torch.equal(tensors["input_ids"], expected.input_ids)
    assert torch.equal(tensors["attention_mask"], expected.attention_mask.bool())


# 1% of the texts are longer than 28 tokens and none is longer than 41, as in TREC.
QUANTILES, TOKENS = [0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1], [5, 8, 10, 13, 16, 22, 28, 41]
LIKE_TREC = np.interp(np.random.default_rng(0).random(5452), QUANTILES, TOKENS).astype(np.int64)

lengths_of_examples = st.lists(st.integers(1, 60), min_size=1, max_size=300).map(np.array)


def indices_of(batches: Sequence[Batch]) -> list[int]:
    return [int(index) for batch in batches for index in batch.indices]


def plan(lengths: NDArray[np.int64], *, seed: int = 0, epoch: int = 0) -> list[Batch]:
    return plan_epoch(
        lengths, effective_batch_size=32, padded_lengths=range(1, 100), seed=seed, epoch=epoch
    )


def same(left: Sequence[Batch], right: Sequence[Batch]) -> bool:
    return indices_of(left) == indices_of(right) and [b.padded_length for b in left] == [
        b.padded_length for b in right
    ]


@pytest.mark.parametrize("device", [CpuDevice(), FewShapesDevice()], ids=["any", "few"])
@settings(max_examples=40)
@given(lengths=lengths_of_examples, batch_size=st.integers(1, 9), seed=st.integers(0, 9))
def test_each_example_is_in_one_batch_of_sufficient_length(
    device: Device, lengths: NDArray[np.int64], batch_size: int, seed: int
) -> None:
    padded_lengths = choose_padded_lengths(lengths, device.shapes)

    for batches in (
        plan_epoch(
            lengths,
            effective_batch_size=batch_size,
            padded_lengths=padded_lengths,
            seed=seed,
            epoch=0,
        ),
        plan_evaluation(lengths, batch_size=batch_size, padded_lengths=padded_lengths),
    ):
        assert sorted(indices_of(batches)) == list(range(len(lengths)))
        sizes = sorted(len(batch.indices) for batch in batches)
        assert sizes[1:] == [batch_size] * (len(batches) - 1)
        assert 0 < sizes[0] <= batch_size
        for batch in batches:
            longest = lengths[batch.indices].max()
            assert batch.padded_length == min(one for one in padded_lengths if one >= longest)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30).map(np.array),
    count=st.integers(1, 4),
    multiple=st.sampled_from([1, 2]),
)
def test_padded_lengths_minimize_padding(
    lengths: NDArray[np.int64], count: int, multiple: int
) -> None:
    shapes = BatchShapes(max_shapes=count, min_padded_length=4, multiple_of=multiple)

    def tokens(padded_lengths: Sequence[int]) -> float:
        padded = np.array(padded_lengths)[np.searchsorted(padded_lengths, lengths)]
        return float(padded.sum())

    chosen = choose_padded_lengths(lengths, shapes)

    longest = shapes.padded_length(int(lengths.max()))
    others = range(4, longest, multiple)
    assert chosen[-1] == longest
    assert set(chosen) <= {*others, longest}
    assert len(chosen) <= count
    assert tokens(chosen) == min(
        tokens([*some, longest])
        for size in range(min(count, len(others) + 1))
        for some in combinations(others, size)
    )


def test_batches_depend_only_on_seed_and_epoch() -> None:
    assert same(plan(LIKE_TREC, seed=1, epoch=2), plan(LIKE_TREC, seed=1, epoch=2))
    assert not same(plan(LIKE_TREC, seed=1, epoch=2), plan(LIKE_TREC, seed=1, epoch=3))
    assert not same(plan(LIKE_TREC, seed=1, epoch=2), plan(LIKE_TREC, seed=2, epoch=2))
    assert not same(plan(LIKE_TREC, seed=1, epoch=2), plan(LIKE_TREC, seed=2, epoch=1))


@pytest.mark.parametrize(
    ("tokens", "examples"), [(0, [4] * 25), (100, [5] * 4 + [10] * 8), (10_000, [64, 36])]
)
def test_extraction_batches_have_the_preferred_number_of_tokens(
    tokens: int, examples: list[int]
) -> None:
    lengths = np.repeat([20, 10], [20, 80])
    shapes = BatchShapes(extraction_tokens=tokens)
    batches = plan_evaluation(lengths, batch_size=4, padded_lengths=[10, 20], shapes=shapes)
    assert [len(batch.indices) for batch in batches] == examples
    assert sorted(np.concatenate([batch.indices for batch in batches])) == list(range(100))
    assert all(lengths[batch.indices].max() == batch.padded_length for batch in batches)


def test_last_batch_has_the_shortest_examples_and_longest_batch_is_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 17, 23)
    batches = plan_epoch(
        lengths, effective_batch_size=4, padded_lengths=range(1, 17), seed=0, epoch=0
    )
    [last] = [batch for batch in batches if len(batch.indices) == 3]
    assert sorted(lengths[last.indices]) == sorted(lengths)[:3]
    first, *others = longest_first(batches)
    assert first.padded_length == max(lengths)
    assert len(others) == len(batches) - 1
