"""``python -m finetune`` does what ``finetune`` does."""

import signal


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback while its modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from finetune.events import clock

    clock.start()  # before slow imports
    from finetune.commands.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
