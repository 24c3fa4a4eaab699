"""Keeps a Mac awake while it works."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.devices.host import is_mac


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep a Mac from sleeping when idle, also while Ctrl-C saves the run."""
    program = shutil.which("caffeinate") if is_mac() else None
    if program is None:
        yield
        return
    with subprocess.Popen(
        [program, "-i", "-w", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield
        finally:
            process.terminate()
