"""``python -m finetune`` does what ``finetune`` does."""

import os
import signal
import sys


def main() -> None:
    """Run the command; Ctrl-C ends it without a traceback while its modules are imported."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from finetune.events import clock

    clock.start()  # before what takes time to import
    from finetune.commands.main import main as run_command

    run_command()


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams.

    Otherwise the first files that are opened would get their descriptors, and the output.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is this one, and child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


if __name__ == "__main__":
    main()
