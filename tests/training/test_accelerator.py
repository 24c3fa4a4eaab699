import pytest
import torch
from accelerate.utils import DistributedType
from tiny_training import copied_parameters, random_examples, take_steps, tiny_training_state

from finetune.devices.cpu import CpuDevice
from finetune.errors import UsageError
from finetune.training.accelerator import Accelerator


def test_bf16_is_for_the_arithmetic_alone() -> None:
    examples = random_examples()
    in_fp32 = tiny_training_state(precision="fp32", dropout=0.0)
    [expected] = take_steps(in_fp32, examples, [0])

    training_state = tiny_training_state(precision="bf16", dropout=0.0)
    before = copied_parameters(training_state.model)
    [loss] = take_steps(training_state, examples, [0])

    assert loss != expected
    assert loss == pytest.approx(expected, abs=0.02)
    for name, parameter in training_state.trained_parameters().items():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert not torch.equal(parameter, before[name])


def test_process_may_run_again_in_another_precision() -> None:
    examples = random_examples()
    losses = {
        precision: take_steps(tiny_training_state(precision=precision), examples, [0])
        for precision in ("fp32", "bf16")
    }

    for precision in ("bf16", "fp32", "bf16"):
        assert (
            take_steps(tiny_training_state(precision=precision), examples, [0]) == losses[precision]
        )


def test_accumulation_set_for_accelerate_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices have their shares already; Accelerate would divide their losses once more."""
    examples = random_examples()
    expected: list[float] = []
    actual: list[float] = []
    for norms in (expected, actual):
        training_state = tiny_training_state(dropout=0.0, max_grad_norm=1e9)
        take_steps(training_state, examples, [0])
        norms += [one.grad.norm().item() for one in training_state.trained_parameters().values()]  # type: ignore[union-attr]
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")

    assert actual == pytest.approx(expected)


def test_a_configuration_that_splits_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.Accelerator.distributed_type", property(lambda self: DistributedType.FSDP)
    )

    with pytest.raises(UsageError, match="FSDP"):
        Accelerator(CpuDevice(), precision="fp32")


@pytest.mark.cuda
def test_step_that_fp16_leaves_out_after_resuming_is_counted() -> None:
    from finetune.devices.cuda import CudaDevice

    accelerator = Accelerator(CudaDevice(), precision="fp16")
    scale = accelerator.scaler_state()["scale"]

    layer = torch.nn.Linear(2, 2, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())

    # As after 4,000 good steps; the next has gradients that are too large.
    accelerator.load_scaler_state({**accelerator.scaler_state(), "scale": 4 * scale})
    assert accelerator.skipped_steps() == 0
    accelerator.backward(layer(torch.ones(2, device="cuda")).sum() * torch.inf)
    accelerator.unscale_gradients(optimizer)
    accelerator.step(optimizer)

    assert accelerator.skipped_steps() == 1
