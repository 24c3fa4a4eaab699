import os
import time
from pathlib import Path

import pytest

from finetune.devices.mps import awake

FAKE = """#!/bin/sh
trap 'echo ended >> {log}; exit' TERM
echo "$@" > {log}
while true; do sleep 0.01; done
"""


def test_a_mac_is_kept_awake_for_this_process_until_the_work_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "log", tmp_path / "caffeinate"
    program.write_text(FAKE.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(awake, "is_mac", lambda: True)
    with awake.kept_awake():
        while not log.exists() or not log.read_text():
            time.sleep(0.01)
    assert log.read_text() == f"-i -w {os.getpid()}\nended\n"
