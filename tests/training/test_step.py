from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tiny_training import (
    CLASSES,
    FewShapesDevice,
    copied_parameters,
    cut_all_rows,
    random_examples,
    take_steps,
    tiny_plan,
    tiny_trainer,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.schema import TrainingConfig
from finetune.devices.base import Device
from finetune.devices.captured import CapturedFunction, Tensors
from finetune.devices.cpu import CpuDevice
from finetune.model.structure import find_structure
from finetune.tasks.single import Single
from finetune.tokenization.examples import Examples
from finetune.training.optimizers import build_optimizer, set_learning_rate, total_norm

ROWS = 13
NO_LIMIT = 1e9


def examples_of(class_weights: str, *, takes_4d_mask: bool = True) -> Examples:
    labels = random_examples(ROWS).labels
    task = Single([""] * CLASSES).with_loss(labels, TrainingConfig(class_weights=class_weights))  # type: ignore[arg-type]
    weights = np.array(task.class_weights, np.float32) if task.class_weights else None
    return random_examples(ROWS, class_weights=weights, takes_4d_mask=takes_4d_mask)


def undivided_gradients(class_weights: str, **options: Any) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients of the weighted cross-entropy in PyTorch."""
    state = tiny_trainer(dropout=0.0, **options)
    examples = examples_of(class_weights, takes_4d_mask=False)
    weights = np.zeros(CLASSES, np.float32)
    weights[examples.labels] = examples.weights
    logits = state.model(**examples.inputs_of(np.arange(ROWS), 16)).logits
    loss = nn.functional.cross_entropy(
        logits, torch.from_numpy(examples.labels), torch.from_numpy(weights)
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: one.grad for name, one in state.trained_parameters().items()}


@pytest.mark.parametrize(
    ("batch_size", "class_weights", "device"),
    [
        (1, "none", CpuDevice()),
        (3, "balanced", FewShapesDevice()),
        (5, "balanced", CpuDevice()),
        (ROWS, "none", FewShapesDevice()),
    ],
)
def test_micro_batch_gradients_sum_to_the_whole_batch_gradients(
    device: Device, class_weights: str, batch_size: int
) -> None:
    expected_loss, expected = undivided_gradients(class_weights)
    state = tiny_trainer(device=device, dropout=0.0, max_grad_norm=NO_LIMIT)

    [loss] = take_steps(state, examples_of(class_weights), [0], batch_size=batch_size)

    assert loss == pytest.approx(expected_loss, abs=1e-6)
    for name, parameter in state.trained_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-6, msg=name)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2


class WithoutScaling(CpuDevice):
    """The CPU, with an AdamW kernel that ignores the gradient scale."""

    fused_adamw_scales_gradients = False


@pytest.mark.parametrize("device", [CpuDevice(), WithoutScaling()])
@pytest.mark.parametrize("max_grad_norm", [1e-4, 1e-2, 1e2])
def test_step_matches_gradient_clipping_by_pytorch(max_grad_norm: float, device: Device) -> None:
    def make() -> Any:
        state = tiny_trainer(dropout=0.0, device=device, max_grad_norm=max_grad_norm)
        for group in state.optimizer.param_groups:
            group["eps"] = 1.0  # so that the size of gradients matters
        return state

    expected, state = make(), make()
    [micro_batch] = cut_all_rows(expected, examples_of("none"), batch_size=ROWS)
    logits = expected.model(**micro_batch.inputs).logits
    nn.functional.cross_entropy(logits, micro_batch.labels).backward()
    nn.utils.clip_grad_norm_(expected.model.parameters(), max_grad_norm)
    for group in expected.optimizer.param_groups:
        group["lr"] = 1e-3
    expected.optimizer.step()

    take_steps(state, examples_of("none"), [1], batch_size=ROWS)

    others = copied_parameters(expected.model)
    for name, parameter in copied_parameters(state.model).items():
        torch.testing.assert_close(parameter, others[name], rtol=1e-5, atol=1e-7, msg=name)


class NoReads(TorchDispatchMode):
    """Fails if tensor values are read, because the CPU would have to wait for a GPU.

    ``tolist`` and ``numpy`` dispatch an operation except for CPU tensors.
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
    def fail(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        raise AssertionError("a tensor is read")

    with monkeypatch.context() as patch:
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(torch.Tensor, name, fail)
        yield NoReads()


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("bert", "fp32"), ("bert", "bf16"), ("distilbert", "fp32"), ("roberta", "fp32"),
     ("electra", "bf16")],
)  # fmt: skip
def test_steps_do_not_wait_for_the_gpu(
    architecture: str, precision: str, no_reads: NoReads
) -> None:
    state = tiny_trainer(architecture=architecture, precision=precision)
    micro_batches = cut_all_rows(state, examples_of("balanced"), batch_size=5)

    with no_reads:
        loss = state.take_step(0, micro_batches)

    assert loss.shape == ()
    assert not loss.requires_grad


class CapturedOnCpu(CapturedFunction):
    """Calls the function on copies of the tensors, starting with the second call."""

    failure: str | None = None

    def __init__(self, function: Callable[[Sequence[Tensors]], torch.Tensor]) -> None:
        self.function = function
        self.calls = 0
        self.is_warm = False

    def prepare(self, arguments: Sequence[Tensors]) -> Callable[[], torch.Tensor] | None:
        if not self.is_warm:
            self.is_warm = True
            return None
        copies = [{name: one.clone() for name, one in each.items()} for each in arguments]
        return lambda: self._call(copies)

    def _call(self, arguments: Sequence[Tensors]) -> torch.Tensor:
        self.calls += 1
        return self.function(arguments)

    def clear(self) -> None:
        self.is_warm = False


class CapturingDevice(CpuDevice):
    captures = True

    def capture(self, function: Callable[[Sequence[Tensors]], torch.Tensor]) -> CapturedFunction:
        return CapturedOnCpu(function)


def test_captured_steps_match_eager_steps() -> None:
    captured, plain = tiny_trainer(device=CapturingDevice()), tiny_trainer()
    torch.manual_seed(0)
    losses = take_steps(captured, random_examples(), range(4))
    torch.manual_seed(0)
    assert losses == pytest.approx(take_steps(plain, random_examples(), range(4)), rel=1e-5)
    assert isinstance(captured.captured, CapturedOnCpu)
    assert captured.captured.calls == 3
    assert captured.cuda_graph_error is None
    expected = copied_parameters(plain.model)
    for name, one in copied_parameters(captured.model).items():
        # The learning rate is an fp32 tensor, not an fp64 number.
        torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_bf16_is_used_only_for_arithmetic() -> None:
    examples = random_examples()
    in_fp32 = tiny_trainer(precision="fp32", dropout=0.0)
    [expected] = take_steps(in_fp32, examples, [0])

    trainer = tiny_trainer(precision="bf16", dropout=0.0)
    before = copied_parameters(trainer.model)
    [loss] = take_steps(trainer, examples, [0])

    assert loss != expected
    assert loss == pytest.approx(expected, abs=0.02)
    for name, parameter in trainer.trained_parameters().items():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert not torch.equal(parameter, before[name])


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, setting: str) -> dict[str, float]:
    """Return a parameter-group setting for each parameter that the optimizer updates."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name_of[parameter]: group[setting]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def expected(model: nn.Module, value_of: Callable[[str], float]) -> dict[str, float]:
    return {name: value_of(name) for name, _ in model.named_parameters()}


def test_only_matrices_decay_and_the_head_has_its_own_learning_rate() -> None:
    model = tiny_model()
    head = find_structure(model).head
    plan = tiny_plan(total_steps=1, weight_decay=0.25, head_lr_multiplier=10.0)

    optimizer = build_optimizer(model, plan, head=head, device=CpuDevice())

    assert by_name(model, optimizer, "weight_decay") == expected(
        model, lambda name: 0.0 if name.endswith("bias") or "LayerNorm" in name else 0.25
    )
    for rate in (0.5, 0.125):
        set_learning_rate(optimizer, rate)

        assert by_name(model, optimizer, "lr") == expected(
            model,
            lambda name: 10 * rate if name in head else rate,  # noqa: B023
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("numbers", [3, 2**17])
def test_norm_is_nonfinite_if_any_tensor_is(numbers: int, value: float) -> None:
    nonfinite = torch.ones(numbers).index_fill(0, torch.tensor(2), value)
    tensors = [torch.ones(3), torch.ones(2**17), nonfinite]
    assert total_norm(tensors[:2]) == pytest.approx((3 + 2**17) ** 0.5)
    assert not total_norm(tensors).isfinite()
