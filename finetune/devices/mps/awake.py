"""Keeps a Mac from going to sleep while it works; its display may."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from finetune.devices.host import is_mac


@contextmanager
def kept_awake() -> Iterator[None]:
    """Hold macOS's assertion against sleep when idle; elsewhere nothing is done.

    ``caffeinate`` ends with this process, however that ends, and by itself here. A process group
    of its own keeps Ctrl-C from it, so that the Mac stays awake while the run is saved.
    """
    program = shutil.which("caffeinate") if is_mac() else None
    if program is None:
        yield
        return
    command = [program, "-i", "-w", str(os.getpid())]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
