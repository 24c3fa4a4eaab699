import time

import psutil
import pytest
import torch

from finetune.devices.threads import ThreadChoice, choose_threads


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let PyTorch have 4 threads on a busy machine; the list holds those that were set."""
    counts = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 60.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    return counts


def choose(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], seconds: dict[int, float]
) -> tuple[ThreadChoice | None, set[int]]:
    """Let work take a time by the number of threads; return the choice and what was tried."""
    clock, tried = [0.0], set[int]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += seconds[threads[-1]]
        tried.add(threads[-1])

    return choose_threads(work), tried


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({4: 0.4, 2: 0.2, 1: 0.3}, 2),
        ({4: 0.4, 2: 0.3, 1: 0.1}, 1),
        ({4: 0.1, 2: 0.2, 1: 0.4}, 4),
        ({4: 0.105, 2: 0.1, 1: 0.4}, 4),
    ],
    ids=["half", "one", "all", "all where fewer gain little"],
)
def test_on_a_busy_machine_the_fastest_number_of_threads_is_set(
    monkeypatch: pytest.MonkeyPatch,
    threads: list[int],
    seconds: dict[int, float],
    expected: int,
) -> None:
    _, tried = choose(monkeypatch, threads, seconds)
    assert tried == {1, 2, 4}
    assert threads[-1] == expected


def test_what_was_chosen_is_said_with_the_timings(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    choice, _ = choose(monkeypatch, threads, {4: 0.4, 2: 0.2, 1: 0.1})
    assert str(choice).startswith("CPU threads: 1, as other processes take 60% of the CPU")


def test_an_idle_machine_uses_all_threads_without_a_timing(
    monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 10.0)
    assert choose(monkeypatch, threads, {}) == (None, set())
    assert threads == [4]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_number_that_a_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch, threads: list[int], name: str
) -> None:
    monkeypatch.setenv(name, "4")
    assert choose(monkeypatch, threads, {}) == (None, set())
    assert threads == [4]
