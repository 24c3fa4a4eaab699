"""A bench's child without torch, that dies on one device."""

import os
import signal
from dataclasses import replace

from finetune.batch_finder.child import connect_to_parent


def main() -> None:
    """Reply with rows of one timing; die on ``fragile``."""
    receive, reply = connect_to_parent()
    while True:
        *_, device, rows = receive()
        if device == "fragile":
            os.kill(os.getpid(), signal.SIGABRT)
        reply([replace(row, timed_rows=1, seconds=[*row.seconds, 1.0]) for row in rows])


if __name__ == "__main__":
    main()
