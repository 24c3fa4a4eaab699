from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import (
    CLASSES,
    FewShapesDevice,
    cut_all_rows,
    random_examples,
    take_steps,
    tiny_training_state,
)
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.tasks.single import balanced_class_weights
from finetune.tokenization.examples import Examples

ROWS = 13
NO_LIMIT = 1e9
DEVICES = [CpuDevice(), FewShapesDevice()]
QUICK_CASES = {(1, "none", 0), (3, "balanced", 1), (5, "balanced", 0), (ROWS, "none", 1)}
SLICES = pytest.mark.parametrize(
    ("batch_size", "class_weights", "device"),
    [
        pytest.param(
            size, weights, DEVICES[device],
            id=f"{size}-{weights}-{['ragged', 'filled'][device]}",
            marks=[] if (size, weights, device) in QUICK_CASES else pytest.mark.slow,
        )
        for size in (1, 3, 5, ROWS)
        for weights in ("none", "balanced")
        for device in (0, 1)
    ],
)  # fmt: skip


def examples_of(class_weights: str, *, takes_4d_mask: bool = True) -> Examples:
    labels = random_examples(ROWS).labels
    is_balanced = class_weights == "balanced"
    weights = balanced_class_weights(labels, classes=CLASSES) if is_balanced else None
    return random_examples(ROWS, class_weights=weights, takes_4d_mask=takes_4d_mask)


def undivided_gradients(class_weights: str, **options: Any) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients as PyTorch's own weighted cross-entropy gives them."""
    training_state = tiny_training_state(dropout=0.0, **options)
    examples = examples_of(class_weights, takes_4d_mask=False)
    weights = np.zeros(CLASSES, np.float32)
    weights[examples.labels] = examples.weights
    logits = training_state.model(**examples.inputs_of(np.arange(ROWS), 16)).logits
    loss = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(examples.labels), torch.from_numpy(weights)
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {
        name: one.grad for name, one in training_state.trained_parameters().items()
    }


@SLICES
def test_gradients_of_slices_add_up_to_those_of_the_undivided_batch(
    device: Device, class_weights: str, batch_size: int
) -> None:
    expected_loss, expected = undivided_gradients(class_weights)
    training_state = tiny_training_state(device=device, dropout=0.0, max_grad_norm=NO_LIMIT)

    [loss] = take_steps(training_state, examples_of(class_weights), [0], batch_size=batch_size)

    assert loss == pytest.approx(expected_loss, abs=1e-6)
    for name, parameter in training_state.trained_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-6, msg=name)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2


@pytest.mark.parametrize("architecture", ["roberta", "deberta-v2", "modernbert"])
def test_gradients_add_up_in_other_architectures(architecture: str) -> None:
    _, expected = undivided_gradients("balanced", architecture=architecture)
    training_state = tiny_training_state(
        architecture=architecture, device=FewShapesDevice(), dropout=0.0, max_grad_norm=NO_LIMIT
    )
    examples = examples_of("balanced", takes_4d_mask=architecture == "roberta")

    take_steps(training_state, examples, [0], batch_size=5)

    for name, parameter in training_state.trained_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_gradients_are_scaled_down_to_the_largest_norm() -> None:
    gradients = []
    for max_grad_norm in (NO_LIMIT, 0.01):
        training_state = tiny_training_state(dropout=0.0, max_grad_norm=max_grad_norm)
        take_steps(training_state, examples_of("none"), [0])
        gradients.append(
            torch.cat([one.grad.flatten() for one in training_state.trained_parameters().values()])  # type: ignore[union-attr]
        )

    free, limited = gradients
    assert free.norm() > 0.1
    assert limited.norm() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(limited / limited.norm(), free / free.norm())


def test_update_takes_the_learning_rate_of_its_number() -> None:
    training_state = tiny_training_state(peak=1e-3, total_steps=12, head_lr_multiplier=8.0)

    for number, rate in ((0, 5e-4), (1, 1e-3), (11, 1e-4)):
        take_steps(training_state, examples_of("none"), [number])

        rates = {group["lr"] for group in training_state.optimizer.param_groups}
        assert rates == {rate, 8 * rate}


def test_gradients_do_not_add_up_over_updates() -> None:
    once, twice = (tiny_training_state(dropout=0.0, peak=1e-30) for _ in range(2))

    take_steps(once, examples_of("none"), [1])
    take_steps(twice, examples_of("none"), [0, 1])

    for name, parameter in twice.trained_parameters().items():
        expected = once.trained_parameters()[name].grad
        torch.testing.assert_close(parameter.grad, expected)


class NoReads(TorchDispatchMode):
    """Fail as soon as anybody wants to know what is in a tensor, for which a GPU must be awaited.

    Only for tensors of the processor can ``tolist`` and ``numpy`` be had without an operation.
    """

    READING = frozenset(
        {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READING, f"{name} reads a tensor"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoReads]:
    def refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise AssertionError("a tensor is read")

    with monkeypatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield NoReads()


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("bert", "fp32"), ("bert", "bf16"), ("distilbert", "fp32"), ("roberta", "fp32"),
     ("electra", "bf16")],
)  # fmt: skip
def test_nothing_is_read_during_an_update(
    architecture: str, precision: str, no_reads: NoReads
) -> None:
    training_state = tiny_training_state(architecture=architecture, precision=precision)
    pieces = cut_all_rows(training_state, examples_of("balanced"), batch_size=5)

    with no_reads:
        loss = training_state.update(0, pieces)

    assert loss.shape == ()
    assert not loss.requires_grad


def test_usual_mask_would_be_read(no_reads: NoReads) -> None:
    training_state = tiny_training_state()
    pieces = cut_all_rows(training_state, examples_of("none", takes_4d_mask=False), batch_size=5)

    with no_reads, pytest.raises(AssertionError, match="_local_scalar_dense reads a tensor"):
        training_state.update(0, pieces)
