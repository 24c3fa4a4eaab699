"""Steps on texts of several windows, whatever the slices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import (
    FewShapesDevice,
    cut_all_rows,
    random_examples,
    take_steps,
    tiny_training_state,
)

from finetune.devices.cpu import CpuDevice
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples
from finetune.tokenization.long_texts import Aggregation
from finetune.tokenization.windows import Windows
from finetune.training.training_state import TrainingState
from finetune.training.windows import WindowBatch, cut_windows

COUNTS = np.array([1, 7, 2, 1, 3, 5])
NO_LIMIT = 1e9


def examples_with_windows(aggregation: Aggregation = "mean") -> Examples:
    rows = random_examples(int(COUNTS.sum()))
    weights = np.linspace(0.5, 2, len(COUNTS), dtype=np.float32)
    return replace(
        rows,
        labels=rows.labels[: len(COUNTS)],
        weights=weights,
        windows=Windows(COUNTS, aggregation),
    )


def gradients_of(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in state.trained_parameters().items()}  # type: ignore[misc]


def undivided_update(examples: Examples, state: TrainingState) -> float:
    """Give the gradients of one forward and backward of all windows; return the loss."""
    assert examples.windows is not None
    logits = state.model(**examples.inputs_of(np.arange(COUNTS.sum()), 16)).logits
    parts = logits.split(COUNTS.tolist())
    pool = torch.amax if examples.windows.aggregation == "max" else torch.mean
    losses = torch.nn.functional.cross_entropy(
        torch.stack([pool(one, 0) for one in parts]),
        torch.from_numpy(examples.labels),
        reduction="none",
    )
    weights = torch.from_numpy(examples.weights)
    loss = (losses * weights / weights.sum()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@pytest.mark.parametrize("aggregation", ["mean", "max"])
@pytest.mark.parametrize("batch_size", [2, 5, 40])
def test_gradients_of_slices_are_those_of_all_windows_at_once(
    aggregation: Aggregation, batch_size: int
) -> None:
    examples = examples_with_windows(aggregation)
    undivided = tiny_training_state(dropout=0.0)
    expected_loss = undivided_update(examples, undivided)

    for device in (CpuDevice(), FewShapesDevice(min_examples=2)):
        state = tiny_training_state(dropout=0.0, device=device, max_grad_norm=NO_LIMIT)
        [loss] = take_steps(state, examples, [0], batch_size=batch_size)

        assert loss == pytest.approx(expected_loss, abs=1e-6)
        for name, gradient in gradients_of(undivided).items():
            torch.testing.assert_close(gradients_of(state)[name], gradient, rtol=0, atol=1e-6)


def test_both_passes_of_a_text_have_the_same_dropout() -> None:
    """With dropout, its loss and gradients are those of one graph over the same slices."""
    examples = examples_with_windows()
    batch = Batch(np.array([1]), padded_length=16)
    device = CpuDevice()

    def part() -> WindowBatch:
        [found] = cut_windows(examples, batch, 3, device=device)
        return found

    one_graph, sliced = (tiny_training_state(dropout=0.3, max_grad_norm=NO_LIMIT) for _ in range(2))
    torch.manual_seed(7)
    logits = torch.cat([one_graph.model(**inputs).logits for inputs in part().slices()])
    loss = torch.nn.functional.cross_entropy(logits.mean(0, keepdim=True), part().labels)
    loss.backward()  # type: ignore[no-untyped-call]
    after = torch.rand(1)
    torch.manual_seed(7)
    actual = sliced.accumulate_gradients([part()])

    assert part().slice_sizes == [3, 2, 2]
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(actual, loss.detach())
    for name, gradient in gradients_of(one_graph).items():
        torch.testing.assert_close(gradients_of(sliced)[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 8, 40])
def test_no_forward_takes_more_windows_than_the_batch_size(batch_size: int) -> None:
    state, seen = tiny_training_state(), []
    state.model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(inputs["input_ids"].shape), with_kwargs=True
    )

    take_steps(state, examples_with_windows(), [0], batch_size=batch_size)

    windows = [rows for rows, _ in seen]
    assert max(windows) <= batch_size
    # What has to be cut, and only that, is read twice.
    assert sum(windows) == COUNTS.sum() + COUNTS[batch_size < COUNTS].sum()


def test_examples_share_a_forward_where_they_fit() -> None:
    batch = Batch(np.arange(len(COUNTS)), padded_length=16)

    parts = cut_windows(examples_with_windows(), batch, 8, device=CpuDevice())

    assert [sum(part.slice_sizes) for part in parts] == [8, 8, 3]


def test_labels_and_shares_follow_their_examples() -> None:
    state = tiny_training_state()
    examples = examples_with_windows()
    parts: list[Any] = list(cut_all_rows(state, examples, batch_size=5))

    labels = torch.cat([one.labels for one in parts]).tolist()
    shares = torch.cat([one.shares for one in parts])

    assert sorted(labels) == sorted(examples.labels.tolist())
    assert shares.sum().item() == pytest.approx(1.0, abs=1e-6)
