"""Keeps a Mac awake while it works."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.devices.host import is_mac


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep an idle Mac awake, including while the run is saved after Ctrl-C."""
    program = shutil.which("caffeinate") if is_mac() else None
    if program is None:
        yield
        return
    command, nowhere = [program, "-i", "-w", str(os.getpid())], subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as process:
        try:
            yield
        finally:
            process.terminate()
