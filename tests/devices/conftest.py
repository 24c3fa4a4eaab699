"""Fixtures that simulate machines."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from machines import LINUX_WITH_CUDA, a_mac, simulate


@pytest.fixture
def simulate_nvidia(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that simulates a computer with a working NVIDIA GPU, with these changes."""

    def simulate_it(**changes: Any) -> None:
        simulate(replace(LINUX_WITH_CUDA, **changes), monkeypatch)

    return simulate_it


@pytest.fixture
def simulate_mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that simulates a 16 GiB Mac with a working GPU, with these changes."""

    def simulate_it(**changes: Any) -> None:
        simulate(a_mac(**changes), monkeypatch)

    return simulate_it
