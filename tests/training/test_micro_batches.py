import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import CLASSES, FewShapesDevice, random_examples

from finetune.devices.cpu import CpuDevice
from finetune.tasks.single import Single
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples
from finetune.training.micro_batches import MicroBatch, cut_batch, move_batches

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
            device=FewShapesDevice() if pads_batches else CpuDevice(),
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


def test_no_example_is_alone_where_the_device_would_drop_its_bias() -> None:
    device = FewShapesDevice(min_examples=2)
    batch = Batch(ROWS, padded_length=14)

    pieces = list(cut_batch(random_examples(), batch, batch_size=1, device=device))

    assert [len(piece.labels) for piece in pieces] == [2, 2, 2, 2]
    assert torch.cat([piece.shares for piece in pieces]).tolist()[-1] == 0


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
    task = Single([""] * CLASSES).with_training_labels(labels, is_balanced=is_balanced)
    weights = task.example_weights(labels)
    lengths = np.full(len(labels), 5)
    examples = Examples(lambda rows, padded_length: {}, lengths, labels, weights)
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


@pytest.mark.parametrize("pads_batches", [False, True])
@pytest.mark.parametrize("prefetch_tokens", [0, 100, 10_000])
def test_batches_that_move_together_are_cut_as_if_each_moved_alone(
    prefetch_tokens: int, pads_batches: bool
) -> None:
    device = FewShapesDevice() if pads_batches else CpuDevice()
    device.prefetch_tokens = prefetch_tokens
    examples = random_examples()
    batches = [
        Batch(np.arange(start, stop), padded_length)
        for start, stop, padded_length in [(0, 7, 16), (7, 12, 12), (12, 19, 16), (19, 23, 12)]
    ]

    moved = list(move_batches(examples, batches, device=device))

    assert [batch for batch, _ in moved] == batches
    for batch_size in (4, 2):
        for batch, cut in moved:
            alone = cut_batch(examples, batch, batch_size=batch_size, device=device)
            for piece, expected in zip(cut(batch_size), alone, strict=True):
                tensors = piece.tensors()
                assert tensors.keys() == expected.tensors().keys()
                for name, tensor in expected.tensors().items():
                    assert torch.equal(tensors[name], tensor), name
