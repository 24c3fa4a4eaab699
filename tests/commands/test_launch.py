"""What the launcher of several processes says of those that failed."""

import signal
from collections.abc import Callable

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from finetune.commands import launch
from finetune.errors import ProcessLost


def failure(exitcode: int, *, second: int) -> ProcessFailure:
    ended = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")
    ended.timestamp = second
    return ended


def fail_with(*failures: ProcessFailure) -> Callable[..., object]:
    def run(*_: str) -> None:
        raise ChildFailedError("finetune", dict(enumerate(failures)))

    return lambda *_: run


@pytest.mark.parametrize(
    "others", [failure(1, second=7), failure(-signal.SIGTERM, second=7)], ids=["failed", "ended"]
)
def test_a_killed_process_is_named_also_where_the_others_fail_in_the_same_second(
    others: ProcessFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = failure(-signal.SIGKILL, second=7)
    monkeypatch.setattr(launch, "elastic_launch", fail_with(others, killed))

    with pytest.raises(ProcessLost, match=r"process 1 on .* was killed by SIGKILL"):
        launch.run_in_processes(2, ["run"])


def test_the_exit_code_is_that_of_the_process_that_failed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = failure(-signal.SIGTERM, second=8), failure(3, second=7), failure(1, second=9)
    monkeypatch.setattr(launch, "elastic_launch", fail_with(*failures))

    assert launch.run_in_processes(3, ["run"]) == 3


def test_a_signal_that_nohup_has_ignored_does_not_stop_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled: list[str] = []

    def run(config: LaunchConfig, *_: str) -> Callable[..., object]:
        handled.append(config.signals_to_handle)
        return lambda *_: None

    monkeypatch.setattr(launch, "elastic_launch", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch.run_in_processes(2, ["run"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handled == ["SIGINT,SIGTERM"]
