from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import (
    CLASSES,
    FewShapesDevice,
    device_with_cuda_shapes,
    random_examples,
    take_steps,
    tiny_trainer,
)

from finetune.config.schema import TrainingConfig
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.tasks.single import Single
from finetune.tokenization.encode import Windows
from finetune.tokenization.examples import Batch, Examples
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.trainer import Trainer

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


@settings(max_examples=40)
@given(
    labels=labels_of_rows,
    batch_size=st.integers(1, 20),
    pads_batches=st.booleans(),
    class_weights=st.sampled_from(["none", "balanced"]),
)
def test_loss_weights_sum_to_one_and_follow_example_weights(
    labels: np.ndarray, batch_size: int, pads_batches: bool, class_weights: Any
) -> None:
    task = Single([""] * CLASSES).with_loss(labels, TrainingConfig(class_weights=class_weights))
    weights = task.example_weights(labels)
    lengths = np.full(len(labels), 5)
    examples = Examples(lambda rows, padded_length: {}, lengths, labels, weights)
    rows = np.arange(len(labels))

    pieces = cut(examples, batch_size=batch_size, pads_batches=pads_batches, rows=rows)

    loss_weights = torch.cat([piece.loss_weights for piece in pieces])
    assert loss_weights.dtype == torch.float32
    assert loss_weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    expected = examples.weights / examples.weights.sum()
    np.testing.assert_allclose(loss_weights[: len(rows)], expected, rtol=1e-6)
    assert not loss_weights[len(rows) :].any()


COUNTS = np.array([1, 7, 2, 1, 3, 5])
NO_LIMIT = 1e9


def examples_with_windows() -> Examples:
    rows = random_examples(int(COUNTS.sum()))
    weights = np.linspace(0.5, 2, len(COUNTS), dtype=np.float32)
    return replace(
        rows, labels=rows.labels[: len(COUNTS)], weights=weights, windows=Windows(COUNTS)
    )


def gradients_of(state: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in state.trained_parameters().items()}  # type: ignore[misc]


def undivided_step(examples: Examples, state: Trainer) -> float:
    """Compute the gradients of all windows in one pass, and return the loss."""
    assert examples.windows is not None
    logits = state.model(**examples.inputs_of(np.arange(COUNTS.sum()), 16)).logits
    parts = logits.split(COUNTS.tolist())
    losses = torch.nn.functional.cross_entropy(
        torch.stack([one.mean(0) for one in parts]),
        torch.from_numpy(examples.labels),
        reduction="none",
    )
    weights = torch.from_numpy(examples.weights)
    loss = (losses * weights / weights.sum()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@pytest.mark.parametrize("batch_size", [2, 5, 40])
def test_sliced_gradients_match_gradients_of_all_windows_at_once(batch_size: int) -> None:
    examples = examples_with_windows()
    undivided = tiny_trainer(dropout=0.0)
    expected_loss = undivided_step(examples, undivided)

    for device in (CpuDevice(), FewShapesDevice(min_examples=2)):
        state = tiny_trainer(dropout=0.0, device=device, max_grad_norm=NO_LIMIT)
        [loss] = take_steps(state, examples, [0], batch_size=batch_size)

        assert loss == pytest.approx(expected_loss, abs=1e-6)
        for name, gradient in gradients_of(undivided).items():
            torch.testing.assert_close(gradients_of(state)[name], gradient, rtol=0, atol=1e-6)


def test_both_passes_of_a_text_use_the_same_dropout() -> None:
    """With dropout, one graph over the same slices gives the same loss and gradients."""
    examples = examples_with_windows()
    batch = Batch(np.array([1]), padded_length=16)

    def part() -> MicroBatch:
        [found] = cut_batch(examples, batch, batch_size=3, device=CpuDevice())
        return found

    one_graph, sliced = (tiny_trainer(dropout=0.3, max_grad_norm=NO_LIMIT) for _ in range(2))
    torch.manual_seed(7)
    logits = torch.cat([one_graph.model(**inputs).logits for inputs in part().slices()])
    loss = torch.nn.functional.cross_entropy(logits.mean(0, keepdim=True), part().labels)
    loss.backward()  # type: ignore[no-untyped-call]
    after = torch.rand(1)
    torch.manual_seed(7)
    actual = sliced.take_step(0, [part()])

    assert part().parts == [(3, 16), (2, 16), (2, 16)]
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(actual, loss.detach())
    for name, gradient in gradients_of(one_graph).items():
        torch.testing.assert_close(gradients_of(sliced)[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8, 40])
@pytest.mark.parametrize("device", [CpuDevice(), device_with_cuda_shapes()], ids=["cpu", "cuda"])
def test_forward_passes_have_at_most_batch_size_windows(device: Device, batch_size: int) -> None:
    state, shapes = tiny_trainer(device=device), []
    state.model.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )

    take_steps(state, examples_with_windows(), [0], batch_size=batch_size)

    windows = [rows for rows, _ in shapes]
    assert max(windows) <= batch_size
    # Only texts that are split into slices are read twice.
    assert sum(windows) == COUNTS.sum() + COUNTS[batch_size < COUNTS].sum()
