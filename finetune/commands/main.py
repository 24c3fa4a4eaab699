"""The ``finetune`` command: imports subcommands on demand and sets exit codes."""

import atexit
import difflib
import importlib
import io
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import click

import finetune
from finetune.devices.host import keep_freed_memory, reduce_gc_frequency
from finetune.distributed import MAX_SECONDS, read_launch
from finetune.errors import (
    FinetuneBaseError,
    FinetuneError,
    InterruptionError,
    ProcessLostError,
    UsageError,
    explain,
)
from finetune.training.interruption import StopRequest, signal_of, stop_on_signal

COMMANDS = {
    "run": "Fine-tune a classifier and write a run folder.",
    "sweep": "Search for better options: a grid or random values.",
    "evaluate": "Compute the metrics of a trained model on a split or a file.",
    "runs": "List the runs in a folder, newest first.",
    "compare": "Compare runs on the same test rows: metrics, options, disagreements.",
    "predict": "Classify texts with a trained model.",
    "label": "Label texts in the browser, helped by a model.",
    "serve": "Serve a trained model over HTTP.",
    "report": "Regenerate the report and the model card of a run.",
    "export": "Export a trained model, for use without PyTorch.",
    "push": "Upload a trained model to the Hugging Face Hub.",
    "init": "Write a configuration for a table of texts.",
    "data": "Check a table for problems, or audit its labels.",
    "models": "List encoders: size, languages, license, memory, uses.",
    "find-batch": "Find the largest batch size that fits and the fastest one.",
    "bench": "Time the devices of this machine on published workloads.",
    "cache": "Show the size of stored features, or delete them.",
    "doctor": "Check whether this machine is ready.",
    "config": "Show a configuration, or list the presets.",
}

EXAMPLES = """\b
Examples:
  finetune run reviews.csv                          train a classifier
  finetune predict latest "Would buy it again"      classify with it
"""
# How long to wait for other processes to report an error.
_OTHERS_FIRST_SECONDS = 1.0
# Commands that torchrun can start in several processes.
LAUNCHED_COMMANDS = ("run", "evaluate")
# What other tools call these commands and options.
MEANT_COMMANDS = {
    **dict.fromkeys(("train", "fit", "finetune"), "run"),
    "resume": "run --resume-from-checkpoint auto",
    "list": "runs",
    "eval": "evaluate",
    **dict.fromkeys(("classify", "infer"), "predict"),
    "upload": "push",
    "check": "data check",
    "benchmark": "bench",
    **dict.fromkeys(("info", "env"), "doctor"),
    "recipes": "config ls",
    "help": "--help",
}
MEANT_OPTIONS = {"resume": "resume_from_checkpoint", "cv": "folds", "file": "data", "mode": "head"}
# By the parameter whose value is missing or invalid.
MEANT_VALUES = {"run": "latest, the newest run", "label": "--label-column"}


class _LazyGroup(click.Group):
    """Imports the module of a command when the command is called, which keeps help fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"finetune.commands.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        """Return the command with this name, or suggest another command."""
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(context, args)
        near = difflib.get_close_matches(name.lower(), [*COMMANDS, *MEANT_COMMANDS], n=1)
        meant = MEANT_COMMANDS.get(near[0], near[0]) if near else None
        if os.path.exists(name):
            meant = f"run {shlex.quote(name)}"
        raise UsageError(
            f"unknown command {name!r}",
            remedy=f"did you mean finetune {meant}?" if meant else "see finetune --help",
        )

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    epilog=EXAMPLES,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.version_option(finetune.__version__, prog_name="finetune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Fine-tune BERT-style text classifiers on a CPU, an NVIDIA GPU or Apple silicon.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 3 bad data, 4 device not available, 5 out of
    memory, 6 offline and not in the cache, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).
    """
    name, launch = context.invoked_subcommand, read_launch()
    if launch.world_size == 1:
        return
    if name not in LAUNCHED_COMMANDS:
        raise UsageError(
            f"finetune {name} runs in one process, but a launcher started {launch.world_size}",
            remedy="start the command without the launcher, or unset WORLD_SIZE",
        )
    if launch.rank == 0 and not {"-q", "--quiet"} & {*context.obj}:
        wait = f"waiting for {launch.world_size} processes, at most {MAX_SECONDS // 60} min"
        click.echo(wait, err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit with an error code if the command fails."""
    has_succeeded = threading.Event()
    if arguments is None:
        # The process runs only this command, so configure it as a whole.
        arguments = sys.argv[1:]
        # The handler registered first runs last.
        atexit.register(_skip_teardown, has_succeeded)
        keep_freed_memory()
        reduce_gc_frequency()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    # Hide progress bars and advice of libraries, unless the user sets these variables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        if read_launch().rank:
            _discard_output()
    except UsageError as error:
        _show(error, arguments)
        sys.exit(error.exit_code)
    try:
        with stop_on_signal(at_once=True) as request:
            cli.main(arguments, prog_name="finetune", standalone_mode=False, obj=arguments)
    except click.exceptions.NoArgsIsHelpError as help_text:
        help_text.show()
        sys.exit(help_text.exit_code)
    except BrokenPipeError:
        # The reader, such as head, has exited. Python must not flush output to it at exit.
        _discard_output()
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        _leave(_explain(error, request), arguments)
    has_succeeded.set()


def _skip_teardown(has_succeeded: threading.Event) -> None:
    """Exit at once, because Python would need 0.2 s to free memory."""
    if has_succeeded.is_set():
        # Flush here, so that Python reports write errors.
        with suppress(OSError, ValueError):
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it is closed
                stream.flush()
            os._exit(0)


def _explain(error: BaseException, request: StopRequest) -> FinetuneBaseError:
    """Convert any error to an error with a remedy or, after a signal, to an interruption."""
    # Click replaces an interruption by its own error and fails if the terminal is closed.
    for raised in (error, error.__cause__, error.__context__):
        if isinstance(raised, InterruptionError):
            return raised
    stopped = error.__cause__ or error
    if request.number or isinstance(error, KeyboardInterrupt | click.Abort):
        number = request.number or signal_of(stopped)
        return InterruptionError("stopped", remedy="run the command again", signal_number=number)
    if isinstance(error, click.UsageError):
        help_command = f"{error.ctx.command_path if error.ctx else 'finetune'} --help"
        meant, message = _find_meant(error), " ".join(error.format_message().split()).rstrip(".")
        if isinstance(error, click.NoSuchOption):
            message = f"unknown option {error.option_name}"
        remedy = f"did you mean {meant}? See {help_command}" if meant else f"see {help_command}"
        return UsageError(message[:1].lower() + message[1:], remedy=remedy)
    if known := explain(error):
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()
        return known
    first_line = (str(error) or "no message").splitlines()[0]
    return FinetuneError(
        f"unexpected {type(error).__name__}: {first_line}",
        remedy="run the command again with --debug, and report the traceback",
    )


def _find_meant(error: click.UsageError) -> str | None:
    """Return the argument that the user probably meant."""
    from finetune.config.schema import OPTION_BY_OTHER_NAME, OPTIONS, flag_of

    known = {flag for param in error.ctx.command.params for flag in param.opts} if error.ctx else ()
    if isinstance(error, click.NoSuchOption):
        name = error.option_name.strip("-").replace("-", "_")
        meant = (OPTION_BY_OTHER_NAME | MEANT_OPTIONS).get(name, "")
        if flag_of(meant) in known:
            return flag_of(meant) + (f" ({OPTIONS[meant].purpose})" if meant in OPTIONS else "")
        return error.possibilities[0] if error.possibilities else None
    if isinstance(error, click.BadParameter) and error.param:
        return MEANT_VALUES.get(str(error.param.name))
    is_second_file = "unexpected extra argument" in error.message and "--test-file" in known
    return "--test-file FILE" if is_second_file else None


def _discard_output() -> None:
    """Redirect standard output to the null device, including Python's flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(error: FinetuneBaseError, arguments: list[str]) -> NoReturn:
    """Print the current error and exit with its exit code."""
    launch = read_launch()
    if launch.world_size == 1:
        _show(error, arguments)
        sys.exit(error.exit_code)
    is_lost = isinstance(error, ProcessLostError)
    if launch.rank == 0:
        _show(error, arguments)
    if launch.rank or is_lost:
        # Let the main process report the error first, and the launcher see the lost process.
        time.sleep(_OTHERS_FIRST_SECONDS)
    # Only the first process of each host reports a lost process.
    is_silent = launch.local_rank > 0 if is_lost else isinstance(error, InterruptionError)
    if launch.rank and not is_silent:
        _show(error, arguments, where=f" in process {launch.rank} on {socket.gethostname()}")
    # Exit at once, because an all-reduce on the GPU blocks Python until every rank arrives.
    os._exit(error.exit_code)


def _show(error: FinetuneBaseError, arguments: list[str], *, where: str = "") -> None:
    from finetune.files import escape_controls, escape_line

    with suppress(OSError):  # the terminal may be closed
        if "--debug" in arguments:
            click.echo(escape_controls(traceback.format_exc()), err=True)
        click.echo(f"error{where}: {escape_line(error.message)}", err=True)
        click.echo(f"  try: {escape_line(error.remedy)}", err=True)
