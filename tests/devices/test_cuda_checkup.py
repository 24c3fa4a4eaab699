from dataclasses import replace

import pytest
from machines import LINUX_WITH_CUDA, pretend

from finetune.devices.check import Check
from finetune.devices.cuda_checkup import describe_gpus


def test_the_driver_and_the_gpu_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(LINUX_WITH_CUDA, monkeypatch)
    assert list(describe_gpus()) == [
        Check("cuda", "ok", "usable: PyTorch is built for CUDA 13.0, the driver is 580.159.04"),
        Check("cuda_0", "ok", "NVIDIA H200, capability 9.0, 139.1 GiB of 139.8 GiB free"),
    ]


def test_each_gpu_has_a_line_and_one_that_is_occupied_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = (("NVIDIA H200", 139.1), ("NVIDIA H200", 1.5))
    pretend(replace(LINUX_WITH_CUDA, gpus=gpus), monkeypatch)
    _, free, occupied = describe_gpus()
    assert (free.name, free.status) == ("cuda_0", "ok")
    assert (occupied.name, occupied.status) == ("cuda_1", "warning")
    assert "1.5 GiB" in occupied.finding
    assert "nvidia-smi" in occupied.remedy


def test_a_driver_that_nobody_can_be_asked_about_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(replace(LINUX_WITH_CUDA, driver=None), monkeypatch)
    assert "unknown version" in next(iter(describe_gpus())).finding
