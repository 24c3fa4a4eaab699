import os
import signal
from pathlib import Path

import psutil
import pytest

from finetune.batch_finder import child as child_module
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


@pytest.mark.parametrize("refuses", [False, True])
def test_a_child_that_lives_is_ended_at_once(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def killpg(group: int, number: int) -> None:
        asked.append((group, number))
        if refuses:
            raise PermissionError(1, "Operation not permitted")
        os.kill(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    child = Child("odd_worker")
    child.kill()
    assert asked == [(child.process_id, signal.SIGKILL)]
    assert child.ending() == "was killed by SIGKILL"
    assert not psutil.pid_exists(child.process_id)


def test_a_line_that_a_child_can_no_longer_read_is_no_error() -> None:
    child = Child("no_such_module")
    try:
        assert child.ending() == "ended with exit code 1"
        child.send({"batch_size": 1})
        assert child.error_lines()[-1].endswith("No module named no_such_module")
    finally:
        child.kill()


def test_a_child_that_has_closed_its_output_and_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_worker.py").write_text("import os, time\nos.close(1)\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child_module, "_END_SECONDS", 0.2)
    child = Child("silent_worker")
    try:
        with pytest.raises(ChildEnded):
            child.receive(seconds=30)
        assert child.ending() == "closed its standard output and did not end"
    finally:
        child.kill()
