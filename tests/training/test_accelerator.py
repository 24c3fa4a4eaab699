import pytest
import torch
from accelerate.utils import DistributedType
from tiny_training import copied_parameters, random_examples, take_steps, tiny_training_state

from finetune.devices.cpu import CpuDevice
from finetune.errors import UsageError
from finetune.training.accelerator import start_accelerate


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


def test_a_configuration_that_splits_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelerate.Accelerator.distributed_type", property(lambda self: DistributedType.FSDP)
    )

    with pytest.raises(UsageError, match="FSDP"):
        start_accelerate(CpuDevice())


@pytest.mark.cuda
def test_step_that_fp16_leaves_out_after_resuming_is_noticed() -> None:
    from finetune.devices.cuda import CudaDevice

    state = tiny_training_state(device=CudaDevice(), precision="fp16")
    take_steps(state, random_examples(), [0])
    # As after many good steps; the next has gradients that are too large.
    state.scaler.load_state_dict({**state.scaler.state_dict(), "scale": 2.0**60})
    take_steps(state, random_examples(), [1])
    assert not state.took_last_step
