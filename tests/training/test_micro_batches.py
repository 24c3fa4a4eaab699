import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from tiny_training import CLASSES, random_examples

from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples
from finetune.training.micro_batches import (
    MicroBatch,
    balanced_class_weights,
    cut_batch,
    row_weights,
)

ROWS = np.array([4, 0, 7, 11, 2, 9, 3])
labels_of_rows = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=60).map(np.array)


def cut(
    examples: Examples, *, batch_size: int, pads_batches: bool = False, rows: np.ndarray = ROWS
) -> list[MicroBatch]:
    return list(
        cut_batch(
            examples,
            Batch(rows, padded_length=14),
            batch_size=batch_size,
            pads_batches=pads_batches,
            torch_device=torch.device("cpu"),
        )
    )


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (5, [5, 2]), (7, [7]), (9, [7])]
)
def test_slices_are_contiguous_and_the_last_may_be_smaller(
    batch_size: int, sizes: list[int]
) -> None:
    examples = random_examples()

    pieces = cut(examples, batch_size=batch_size)

    assert [len(piece.labels) for piece in pieces] == sizes
    assert torch.cat([piece.labels for piece in pieces]).tolist() == examples.labels[ROWS].tolist()
    whole = examples.inputs_of(ROWS, 14)
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([piece.inputs[name] for piece in pieces]), tensor)


@settings(max_examples=40)
@given(
    labels=labels_of_rows,
    batch_size=st.integers(1, 20),
    pads_batches=st.booleans(),
    is_balanced=st.booleans(),
)
def test_shares_add_up_to_1_and_are_as_the_weights(
    labels: np.ndarray, batch_size: int, pads_batches: bool, is_balanced: bool
) -> None:
    weights = (
        balanced_class_weights(labels, classes=CLASSES)
        if is_balanced
        else np.ones(CLASSES, np.float32)
    )
    lengths = np.full(len(labels), 5)
    examples = Examples(
        lambda rows, padded_length: {}, lengths, labels, row_weights(labels, weights)
    )
    rows = np.arange(len(labels))

    pieces = cut(examples, batch_size=batch_size, pads_batches=pads_batches, rows=rows)

    shares = torch.cat([piece.shares for piece in pieces])
    assert shares.dtype == torch.float32
    assert shares.sum().item() == pytest.approx(1.0, abs=1e-6)
    expected = examples.weights / examples.weights.sum()
    np.testing.assert_allclose(shares[: len(rows)], expected, rtol=1e-6)
    assert not shares[len(rows) :].any()


def test_last_slice_is_filled_with_rows_that_have_no_share() -> None:
    examples = random_examples()

    *_, last = cut(examples, batch_size=4, pads_batches=True)

    assert last.shares[:3].all()
    assert last.shares[3] == 0
    assert last.labels.tolist() == examples.labels[[2, 9, 3, 3]].tolist()
    assert torch.equal(last.inputs["input_ids"][3], last.inputs["input_ids"][2])
    # Attention over nothing is NaN on MPS.
    assert last.inputs["attention_mask"].flatten(1).any(dim=1).all()


@given(labels=labels_of_rows)
def test_balanced_weights_are_those_of_scikit_learn(labels: np.ndarray) -> None:
    present = np.unique(labels)

    weights = balanced_class_weights(labels, classes=CLASSES)

    expected = compute_class_weight("balanced", classes=present, y=labels)
    np.testing.assert_allclose(weights[present], expected, rtol=1e-6)
    assert not np.delete(weights, present).any()
    assert weights.dtype == np.float32


@given(labels=labels_of_rows)
def test_balanced_weights_leave_the_mean_weight_of_a_row_at_1(labels: np.ndarray) -> None:
    weights = row_weights(labels, balanced_class_weights(labels, classes=CLASSES))

    assert weights.mean() == pytest.approx(1.0, rel=1e-5)


def test_rows_weigh_as_their_class() -> None:
    assert row_weights(np.array([2, 0, 2]), [0.5, 1.0, 3.0]).tolist() == [3.0, 0.5, 3.0]
