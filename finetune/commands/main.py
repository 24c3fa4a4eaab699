"""The command ``finetune``: its commands, imported when they are called, and its exit codes."""

import errno
import importlib
import io
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import NoReturn

import click

import finetune
from finetune.commands.usage import explain_usage
from finetune.devices.host import keep_freed_memory, reduce_gc_frequency
from finetune.distributed.launch import Launch, read_launch
from finetune.errors import FinetuneError, Interrupted, NotWritten, ProcessLost, UsageError
from finetune.escaping import escape_controls, escape_line
from finetune.training.interruption import StopRequest, raise_on_signal, signal_of

COMMANDS = {
    "run": "Fine-tune a classifier and write a run folder.",
    "evaluate": "Evaluate a run's model on a split of its data.",
    "compare": "Compare runs on the same test rows: metrics, options, rows that differ.",
    "predict": "Classify texts with a run's model.",
    "report": "Write a run's report and model card anew.",
    "export": "Write a run's model for another runtime: ONNX, Core ML.",
    "push": "Upload a run's model to the Hugging Face Hub.",
    "init": "Write a configuration for a table of texts.",
    "data": "Check the data of a run: classes, duplicates, leaks, lengths.",
    "find-batch": "Find the largest batch size that fits, and the fastest.",
    "bench": "Time this machine's devices at published workloads, side by side.",
    "cache": "List or delete stored features and token ids.",
    "doctor": "Check whether this machine is ready.",
    "config": "Show, check and copy configurations.",
    "completion": "Print the completion script of a shell.",
}

EXAMPLES = """\b
Examples:
  finetune run --data reviews.csv                   train a classifier
  finetune predict runs/demo "Would buy it again"   classify with it
"""
_OTHERS_FIRST_SECONDS = 1.0
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is called, so that help stays quick."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"finetune.commands.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    epilog=EXAMPLES,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        # --batch_size is read as --batch-size.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.version_option(finetune.__version__, prog_name="finetune")
def cli() -> None:
    """Fine-tune BERT-like text classifiers on a Mac's GPU, on a CPU, or on CUDA.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 bad data, 4 device not available, 5 out of
    memory, 6 offline and not in the cache; 130 interrupted, by SIGTERM 143, by SIGHUP 129.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    if arguments is None:
        # The process is the command's own, and may be set up for it.
        arguments = sys.argv[1:]
        _open_standard_streams()
        keep_freed_memory()
        reduce_gc_frequency()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    _quieten_libraries()
    try:
        launch = read_launch()
    except UsageError as error:
        _show(error, arguments)
        sys.exit(error.exit_code)
    if sys.stdout is None:
        remedy = "redirect it, to a file or to /dev/null"
        _leave(NotWritten("standard output is closed", remedy=remedy), arguments)
    if not launch.is_main:
        _discard_output()
    try:
        with raise_on_signal() as request:
            cli.main(arguments, prog_name="finetune", standalone_mode=False, obj=arguments)
    except click.exceptions.NoArgsIsHelpError as help_text:
        help_text.show()
        sys.exit(help_text.exit_code)
    except BrokenPipeError:
        # The reader, such as head, has left; Python must not try to flush to it at exit.
        _discard_output()
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        _leave(_explain(error, request), arguments)


def _open_standard_streams() -> None:
    """Let no file or socket have the number of a stream that is closed: libraries write to it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _explain(error: BaseException, request: StopRequest) -> FinetuneError:
    """Return an error in two lines; whatever a signal has led to, that the signal has come."""
    if isinstance(error, Interrupted):
        return error
    if request.number or isinstance(error, KeyboardInterrupt | click.Abort):
        # Click raises its own error in place of an interruption.
        number = request.number or signal_of(error.__cause__ or error)
        return Interrupted("stopped", remedy="run the command again", signal_number=number)
    if isinstance(error, click.UsageError):
        return explain_usage(error)
    if isinstance(error, FinetuneError):
        return error
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return _explain_disk(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"the name {error.filename} is too long", remedy="choose a shorter one")
    first_line = (str(error) or "no message").splitlines()[0]
    return FinetuneError(
        f"unexpected {type(error).__name__}: {first_line}",
        remedy="run it again with --debug and report what it prints",
    )


def _explain_disk(error: OSError) -> NotWritten:
    if error.filename is None:
        _discard_output()
    what = error.filename or "standard output"
    remedy = "make room, or choose another place; --debug shows what was being written"
    return NotWritten(f"{what} can't be written: {error.strerror}", remedy=remedy)


def _discard_output() -> None:
    """Let nothing be written: by a process beside the main one, or in another try at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(error: FinetuneError, arguments: list[str]) -> NoReturn:
    """Print an error and leave with its exit code; called while the error is handled."""
    launch = read_launch()
    if launch.world_size == 1:
        _show(error, arguments)
        sys.exit(error.exit_code)
    if not (launch.is_main or isinstance(error, Interrupted | ProcessLost)):
        # The launcher ends this process if the main one fails too, which may be of the same cause.
        time.sleep(_OTHERS_FIRST_SECONDS)
    if launch.is_main:
        _show(error, arguments)
    elif _shows_too(launch, error):
        _show(error, arguments, where=f" in process {launch.rank} on {socket.gethostname()}")
    if isinstance(error, ProcessLost):
        # So that the launcher sees the end of that process before the end of this one.
        time.sleep(_OTHERS_FIRST_SECONDS)
    # At once: a GPU that adds up gradients waits for the other processes, and Python for it.
    os._exit(error.exit_code)


def _show(error: FinetuneError, arguments: list[str], *, where: str = "") -> None:
    # A terminal that was closed takes no more words.
    with suppress(OSError):
        if "--debug" in arguments:
            click.echo(escape_controls(traceback.format_exc()), err=True)
        click.echo(f"error{where}: {escape_line(error.message)}", err=True)
        click.echo(f"  try: {escape_line(error.remedy)}", err=True)


def _shows_too(launch: Launch, error: FinetuneError) -> bool:
    """Return whether a process beside the main one shows its error."""
    if isinstance(error, ProcessLost):
        return launch.local_rank == 0
    return not isinstance(error, Interrupted)


def _quieten_libraries() -> None:
    """Keep the libraries' own progress and advice off the terminal; a user's wish goes first."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
