import pytest
import torch

from finetune.devices.base import gibibytes, why_operation_fails


def test_an_operation_works_on_the_processor() -> None:
    assert why_operation_fails(torch.device("cpu")) is None


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


def test_sizes_are_told_in_gibibytes() -> None:
    assert gibibytes(25_125_558_682) == "23.4 GiB"
