"""Machines that are not here, faked where the package meets them: platform, sysctl and PyTorch."""

import platform
import subprocess
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import psutil
import pytest
import torch

REAL_ONES = torch.ones

MAC_SYSCTLS = {"hw.optional.arm64": "1", "machdep.cpu.brand_string": "Apple M2"}


@pytest.fixture
def pretend_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computer without a GPU."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.fixture
def pretend_nvidia(monkeypatch: pytest.MonkeyPatch, pretend_linux: None) -> Callable[..., None]:
    """A computer with an NVIDIA GPU whose first operation may fail."""

    def pretend(*, failure: str | None = None, has_bf16: bool = True) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "ones", _ones(failure))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
        properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_110_000_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)

    return pretend


@pytest.fixture
def pretend_mac(monkeypatch: pytest.MonkeyPatch, pretend_linux: None) -> Callable[..., None]:
    """A Mac with 16 GiB; whatever the keywords do not change, it can train on its GPU."""

    def pretend(
        *,
        macos: str = "14.5",
        machine: str = "arm64",
        sysctls: Mapping[str, str] = MAC_SYSCTLS,
        is_built: bool = True,
        is_available: bool = True,
        failure: str | None = None,
    ) -> None:
        def run_sysctl(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            program, option, name = command
            assert (program, option) == ("/usr/sbin/sysctl", "-n")
            if name in sysctls:
                return subprocess.CompletedProcess(command, 0, f"{sysctls[name]}\n", "")
            return subprocess.CompletedProcess(command, 1, "", f"sysctl: unknown oid '{name}'\n")

        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
        monkeypatch.setattr(subprocess, "run", run_sysctl)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_available)
        monkeypatch.setattr(torch, "ones", _ones(failure))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * 2**30))

    return pretend


def _ones(failure: str | None) -> Callable[..., torch.Tensor]:
    """Stand in for ``torch.ones`` on a GPU: fill processor memory, or fail as the GPU would."""

    def ones(*size: int, device: torch.device) -> torch.Tensor:
        if failure is not None:
            raise RuntimeError(failure)
        return REAL_ONES(*size)

    return ones
