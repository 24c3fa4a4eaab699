import platform
import signal
import subprocess
import sys

import pytest
from tiny_models import tiny_case

from finetune.batch_finder.child import Child


@pytest.mark.slow
def test_a_worker_takes_its_budget_trains_and_names_the_class_of_an_error() -> None:
    child = Child("finetune.batch_finder.worker")
    try:
        child.send({"case": tiny_case().to_json(), "limit_bytes": 2**31, "budget_bytes": 2**30})
        assert child.receive(seconds=60) == {"budget_bytes": 2**30}
        assert child.receive(seconds=60) == {"ready": True}
        child.send(2)
        measurement = child.receive(seconds=60)["measurement"]
        assert measurement["examples_per_second"] > 0
        child.send("two")
        failure = child.receive(seconds=60)
        assert failure["is_out_of_memory"] is False
        assert "TypeError" in failure["failure"]
    finally:
        child.kill()


@pytest.mark.skipif(platform.system() != "Linux", reason="the kernel of Linux does this")
def test_the_kernel_kills_a_worker_with_its_parent_and_before_other_processes() -> None:
    # prctl(2) 2 is PR_GET_PDEATHSIG. Where /proc can't be written to, the score stays as it is.
    program = (
        "import ctypes, os, signal\n"
        "from finetune.batch_finder.worker import end_with_parent\n"
        "end_with_parent()\n"
        "number = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(number))\n"
        "is_writable = os.access('/proc/self/oom_score_adj', os.W_OK)\n"
        "score = open('/proc/self/oom_score_adj').read().strip() if is_writable else '1000'\n"
        "print(number.value, score, signal.getsignal(signal.SIGINT).name)"
    )
    worker = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert worker.stdout.split() == [str(int(signal.SIGKILL)), "1000", "SIG_IGN"]


def test_the_end_of_standard_input_ends_a_process_that_is_busy() -> None:
    busy = (
        "from finetune.batch_finder.worker import read_orders\n"
        "orders = read_orders()\nprint(orders.get(), flush=True)\nwhile True: pass"
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
        assert process.wait(timeout=2) == 0
