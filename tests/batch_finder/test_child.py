import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict
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


def test_a_line_that_a_child_can_no_longer_read_is_no_error() -> None:
    child = Child("no_such_module")
    try:
        assert child.exit_status() == "ended with exit code 1"
        child.send({"batch_size": 1})
        assert child.describe_end().endswith("No module named no_such_module")
    finally:
        child.kill()


def test_what_python_prints_as_it_starts_is_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome to this cluster')\n")
    (tmp_path / "printing_worker.py").write_text("print('{\"ready\": true}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    child = Child("printing_worker")
    try:
        while (reply := child.receive(seconds=30)) is None:
            pass
    finally:
        child.kill()
    assert reply == {"ready": True}


@pytest.mark.skipif(platform.system() != "Linux", reason="the kernel of Linux does this")
def test_the_kernel_kills_a_worker_with_its_parent_and_before_other_processes() -> None:
    # prctl(2) 2 is PR_GET_PDEATHSIG. Where /proc can't be written to, the score stays as it is.
    program = (
        "import ctypes, os, signal\n"
        "from finetune.batch_finder.child import connect_to_parent\n"
        "_, reply = connect_to_parent()\n"
        "number = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(number))\n"
        "is_writable = os.access('/proc/self/oom_score_adj', os.W_OK)\n"
        "score = open('/proc/self/oom_score_adj').read().strip() if is_writable else '1000'\n"
        "reply([number.value, score, signal.getsignal(signal.SIGINT).name])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout
        assert json.loads(worker.stdout.readline()) == [int(signal.SIGKILL), "1000", "SIG_IGN"]


def test_the_end_of_standard_input_ends_a_process_that_is_busy() -> None:
    busy = (
        "from finetune.batch_finder.child import connect_to_parent\n"
        "requests, reply = connect_to_parent()\nreply(requests.get())\nwhile True: pass"
    )
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write("1\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_worker_takes_its_budget_trains_and_names_the_class_of_an_error() -> None:
    child = Child("finetune.batch_finder.trials")
    try:
        child.send({"case": asdict(tiny_case()), "limit_bytes": 2**31, "budget_bytes": 2**30})
        assert child.receive(seconds=60) == {"budget_bytes": 2**30}
        assert child.receive(seconds=60) == {"ready": True}
        child.send(2)
        reply = child.receive(seconds=60)
        assert reply
        assert reply["measurement"]["examples_per_second"] > 0
        child.send("two")
        failure = child.receive(seconds=60)
        assert failure
        assert failure["is_out_of_memory"] is False
        assert "TypeError" in failure["failure"]
    finally:
        child.kill()
