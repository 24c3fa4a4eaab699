"""Simulated machines, for tests that need another machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from machines import LINUX_WITH_CUDA, a_mac, pretend


@pytest.fixture
def pretend_nvidia(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A computer with an NVIDIA GPU that works, apart from the changes."""

    def pretend_it(**changes: Any) -> None:
        pretend(replace(LINUX_WITH_CUDA, **changes), monkeypatch)

    return pretend_it


@pytest.fixture
def pretend_mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A Mac with 16 GiB that can train on its GPU, apart from the changes."""

    def pretend_it(**changes: Any) -> None:
        pretend(a_mac(**changes), monkeypatch)

    return pretend_it
