"""``finetune serve --workers``, several processes on one port."""

import json
import signal
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from blocking import FINETUNE, Start

from finetune.errors import FinetuneError
from finetune.training.interruption import stop_on_signal
from finetune.web.server import bind
from finetune.web.workers import run_workers

JSON = {"content-type": "application/json"}


def test_error_before_workers_are_ready_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as listener, stop_on_signal(), pytest.raises(SystemExit) as ended:
        run_workers(["unknown"], listener, 3, on_ready=lambda: pytest.fail("ready"))
    assert ended.value.code == 2
    assert capfd.readouterr().err.count("error:") == 1


def test_command_fails_if_a_worker_exits() -> None:
    calls = list[None]()
    ended = pytest.raises(FinetuneError, match=r"worker \d ended with code 0")
    with bind("127.0.0.1", 0) as listener, stop_on_signal(), ended:
        run_workers(["serve", "--help"], listener, 2, on_ready=lambda: calls.append(None))
    assert len(calls) == 1


@pytest.fixture
def start_two(start: Start, finished_run: Path) -> Callable[[], tuple[psutil.Process, str]]:
    def start_both() -> tuple[psutil.Process, str]:
        arguments = ("--port", "0", "--json", "--device", "cpu", "--workers", "2")
        process = start(*FINETUNE, "serve", str(finished_run), *arguments)
        assert process.stdout
        address = urlsplit(json.loads(process.stdout.readline())["address"]).netloc
        return psutil.Process(process.pid), address

    return start_both


@pytest.mark.slow
def test_workers_finish_requests_after_a_signal(
    start_two: Callable[[], tuple[psutil.Process, str]],
) -> None:
    process, address = start_two()
    assert len(process.children()) == 2
    connections = [HTTPConnection(address, timeout=60) for _ in range(4)]
    body = json.dumps({"inputs": ["Who wrote Faust? " * 20] * 512})
    for connection in connections:
        connection.request("POST", "/", body, JSON)
    threading.Event().wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert [each.getresponse().status for each in connections] == [200] * 4
    assert process.wait(60) == 0


@pytest.mark.slow
def test_workers_exit_with_each_other_and_with_their_parent(
    start_two: Callable[[], tuple[psutil.Process, str]],
) -> None:
    process, _ = start_two()
    first, second = process.children()
    first.kill()
    assert process.wait(30) == 1
    assert not second.is_running()
    process, _ = start_two()
    workers = process.children()
    process.kill()
    assert psutil.wait_procs(workers, 30)[1] == []
