import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_models import tiny_case

from finetune.batch_finder.child import Child, ChildEnded


def test_a_child_that_has_ended_is_not_yet_reaped_and_is_killed_on_a_mac(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On macOS, killpg answers EPERM for a group of which nothing is left but a zombie."""

    def killpg(group: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    child = Child("no_such_module")
    with pytest.raises(ChildEnded):
        child.receive(seconds=60)
    monkeypatch.setattr(os, "killpg", killpg)
    child.kill()
    assert not psutil.pid_exists(child.process_id)


def test_a_request_that_a_child_can_no_longer_read_is_no_error() -> None:
    with Child("no_such_module") as child:
        assert child.exit_status() == "ended with exit code 1"
        child.send({"batch_size": 1})
        assert child.describe_end().endswith("No module named no_such_module")


@pytest.fixture
def replies_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Child]:
    """Return what starts a child that is connected and then runs a program."""
    monkeypatch.syspath_prepend(tmp_path)

    def start(program: str) -> Child:
        connected = "from finetune.batch_finder.child import connect_to_parent\n"
        connected += "receive, reply = connect_to_parent()\n"
        (tmp_path / "some_worker.py").write_text(connected + program)
        return Child("some_worker")

    return start


@pytest.mark.skipif(platform.system() != "Linux", reason="the kernel of Linux does this")
def test_the_kernel_kills_a_worker_with_its_parent_and_before_other_processes(
    replies_of: Callable[[str], Child],
) -> None:
    # prctl(2) 2 is PR_GET_PDEATHSIG. Where /proc can't be written to, the score stays as it is.
    program = (
        "import ctypes, os, signal\n"
        "print('a library says so')\n"
        "number = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(number))\n"
        "is_writable = os.access('/proc/self/oom_score_adj', os.W_OK)\n"
        "score = open('/proc/self/oom_score_adj').read().strip() if is_writable else '1000'\n"
        "reply([number.value, score, signal.getsignal(signal.SIGINT).name])"
    )
    with replies_of(program) as child:
        assert child.receive(seconds=60) == [int(signal.SIGKILL), "1000", "SIG_IGN"]


def test_the_end_of_the_connection_ends_a_process_that_is_busy(
    replies_of: Callable[[str], Child],
) -> None:
    with replies_of("reply(receive())\nwhile True: pass") as child:
        child.send({"batch_size": 1})
        assert child.receive(seconds=60) == {"batch_size": 1}
        child._connection.close()
        assert child.exit_status() == "ended with exit code 0"


@pytest.mark.slow
def test_a_worker_takes_its_budget_trains_and_names_the_class_of_an_error() -> None:
    with Child("finetune.batch_finder.trials") as child:
        child.send((tiny_case(), 2**31, None))
        budget_bytes = child.receive(seconds=60)
        assert budget_bytes
        assert budget_bytes <= 2**31
        child.send(2)
        trial = child.receive(seconds=60)
        assert trial
        assert trial.examples_per_second > 0
        child.send("two")
        failure = child.receive(seconds=60)
        assert failure
        assert failure.status == "failed"
        assert "TypeError" in failure.reason
