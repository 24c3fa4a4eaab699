from types import SimpleNamespace

import pytest
import torch

from finetune.devices.base import Device, why_operation_fails


def test_a_failing_operation_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with `TORCH_USE...`")

    monkeypatch.setattr(torch, "ones", fail)
    assert why_operation_fails(torch.device("cpu")) == "CUDA error: no kernel image is available"


def test_garbage_without_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    assert (
        why_operation_fails(torch.device("cpu")) == "the sum of an 8 by 8 product is 0.0, not 512"
    )


@pytest.mark.parametrize(("state_bytes", "is_restored"), [(16, True), (44, False)])
def test_random_numbers_of_another_kind_of_gpu_are_left_alone(
    state_bytes: int, is_restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[torch.Tensor] = []
    module = SimpleNamespace(
        get_rng_state=lambda: torch.zeros(16, dtype=torch.uint8), set_rng_state=restored.append
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    gpu = Device()
    gpu.torch_device = torch.device("cuda")
    saved = torch.zeros(state_bytes, dtype=torch.uint8)
    gpu.set_random_state({"cpu": torch.get_rng_state(), "device": saved})
    assert len(restored) == is_restored
