"""Flags that several commands share, and flags generated from the schema."""

import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import click

from finetune.commands.console import show_json, showing
from finetune.config.schema import OPTIONS, Option, flag_of, help_of
from finetune.devices import DEVICE_NAMES
from finetune.errors import UsageError
from finetune.events import Event, Info, sent_to
from finetune.runs.folder import RunFolder, find_latest, find_several, open_run_folder

if TYPE_CHECKING:
    from finetune.config.load import LoadedConfig

RARE_OPTIONS = {"config", "keep_models", "no_progress", "debug"}
HELP_ALL = "finetune.help_all"
T = TypeVar("T")
Command = Callable[..., Any]


class _Path(click.Path):
    """A file, a folder or a name, not empty. ~ is the home folder."""

    def convert(self, value: Any, *context: Any) -> Any:
        """Expand ~ in the path: shells don't expand ``--output-dir=~/x``."""
        if not str(value):
            self.fail("the value is empty", *context)
        return super().convert(os.path.expanduser(value), *context)


# Not necessarily an existing file: also a Hub ID, a preset or a new folder.
NAME = _Path(readable=False)
PATH = _Path(path_type=Path)
config_option = click.option(
    "-c", "--config", type=NAME, help="YAML file or preset; finetune config ls lists the presets."
)
assignments_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="SECTION.OPTION=VALUE",
    help="Set any configuration option; can be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
# For commands that use a trained model.
device_option = click.option(
    "--device",
    type=click.Choice(DEVICE_NAMES),
    default="auto",
    envvar="FINETUNE_DEVICE",
    show_envvar=True,
    help="Device to use.  [default: auto]",
)
PORT = click.IntRange(0, 65535)


class _Run(_Path):
    """A run folder. ``latest`` means the newest finished run, whose path is printed."""

    def convert(self, value: Any, *context: Any) -> Any:
        """Return the folder path."""
        with sent_to(_echo):
            path = find_latest(Path(value))
        return super().convert(value if path == Path(value) else path, *context)


def _echo(event: Event) -> None:
    if isinstance(event, Info):
        click.echo(event.message, err=True)


def source_options(command: Command) -> Command:
    """Add the FILE argument and the ``--config`` and ``--set`` options to a command."""
    file_argument = click.argument("file", required=False, metavar="[FILE]", type=_Run())
    return file_argument(config_option(assignments_option(command)))


# Read by main(), which handles all errors.
debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show the traceback if an error occurs."
)


def chosen_options(
    *names: str,
    sections: Collection[str] = (),
    without: Collection[str] = (),
    not_guessed: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Return a decorator that adds flags for these schema options and sections.

    ``without`` lists options in these sections that the command doesn't read, and ``not_guessed``
    options that it doesn't guess.
    """

    def add_flags(command: Command) -> Command:
        for option in reversed(OPTIONS.values()):
            is_in_section = option.section in sections and option.name not in without
            if option.name in names or is_in_section:
                is_guessed = option.is_guessed and option.name not in not_guessed
                command = _flag(replace(option, is_guessed=is_guessed))(command)
        return command

    return add_flags


def options_of(
    function: Callable[..., Any], *skipped: str, only: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that adds a flag for each keyword argument of a function.

    The help comes from the docstring of the function.
    """
    texts = help_of(function)

    def add_flags(command: Command) -> Command:
        for name, parameter in [*signature(function).parameters.items()][::-1]:
            if parameter.kind is not Parameter.KEYWORD_ONLY or name in skipped:
                continue
            if only and name not in only:
                continue
            # An argument of the function replaces the schema option with the same name.
            params: list[click.Parameter] = vars(command).get("__click_params__", [])
            params[:] = [param for param in params if param.name != name]
            kind = _flag_type(parameter.annotation, has_range=True)
            flag = click.option(
                flag_of(name),
                name,
                type=kind,
                metavar="N" if isinstance(kind, click.IntRange) else None,
                is_flag=kind is bool,
                default=parameter.default,
                show_default=parameter.default is not None,
                help=texts[name],
            )
            command = (device_option if name == "device" else flag)(command)
        return command

    return add_flags


def output_file_option(description: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--output`` and ``--overwrite``."""
    output = click.option("--output", type=PATH, help=description)
    overwrite = click.option("--overwrite", is_flag=True, help="Replace the --output file.")
    return lambda command: output(overwrite(command))


def run_argument(command: Command) -> Command:
    """Add the RUN argument to a command."""
    return click.argument("run", type=_Run(path_type=Path))(command)


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists the options for a first run, and ``--help-all`` all."""

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        """Return the parameters, including ``--help-all``."""
        return [*super().get_params(context), _help_all]

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a single list of options, or one list per schema section."""
        is_short, parameters = HELP_ALL not in context.meta, self.get_params(context)
        has_file = any(parameter.name == "file" for parameter in parameters)
        # A command option can have the same name as a schema option.
        rare = {option.description for option in OPTIONS.values() if not option.is_first}
        of_trec = "with --data trec"
        names = ["options", *(option.section for option in OPTIONS.values()), of_trec]
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
        for parameter in parameters:
            if not isinstance(parameter, click.Option):
                continue
            is_rare = parameter.name in RARE_OPTIONS or str(parameter.help).split("  [")[0] in rare
            if is_short and is_rare and (has_file or parameter.name != "data"):
                continue
            flag, text = parameter.get_help_record(context) or ("", "")
            option, group = OPTIONS.get(parameter.name or ""), "options"
            if is_short:
                flag = flag.partition(" / --no-")[0]
            elif option:
                group = of_trec if option.goes_with == ("trec",) else option.section
            groups[group].append((flag, text))
        for name, rows in groups.items():
            if rows:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(rows)


def _show_all_help(context: click.Context, _: click.Parameter, is_set: bool) -> None:
    if is_set:
        context.meta[HELP_ALL] = True
        click.echo(context.get_help())
        context.exit()


_help_all = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all_help,
    help="Show all options in groups and exit.",
)


@dataclass(frozen=True)
class Display:
    """How a command shows its progress and its result."""

    as_json: bool
    quiet: bool
    no_progress: bool

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show events on standard error."""
        with showing(quiet=self.quiet, no_progress=self.no_progress) as show, sent_to(show):
            yield

    def run(self, work: Callable[..., T], as_text: Callable[[T], None], **options: Any) -> T:
        """Call a function, show its events, then print and return its result."""
        with self.progress():
            result = work(**options)
        self.show(result, as_text)
        return result

    def show(self, result: T, as_text: Callable[[T], None]) -> None:
        """Print a result as JSON if requested, otherwise with ``as_text``."""
        (show_json if self.as_json else as_text)(result)


def with_json(command: Command) -> Command:
    """Add ``--json`` and ``--debug`` to a command, and pass a ``display``.

    Apply this decorator last, directly above the function.
    """
    return json_option(_with_a_display(command))


def with_display(command: Command) -> Command:
    """Add all output flags to a command, and pass them as a ``display``.

    Apply this decorator last, directly above the function.
    """
    return json_option(_quiet_option(_no_progress_option(_with_a_display(command))))


_quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print only the result, warnings and errors."
)
_no_progress_option = click.option(
    "--no-progress", is_flag=True, help="Print progress as lines, not live."
)


def _with_a_display(command: Command) -> Command:
    @debug_option
    @wraps(command)
    def call(
        *, as_json: bool, quiet: bool = False, no_progress: bool = False, **options: Any
    ) -> Any:
        return command(display=Display(as_json, quiet, no_progress), **options)

    return call


def load(
    *,
    file: str | Path | None = None,
    config: str | Path | None = None,
    assignments: Sequence[str] = (),
    **flags: Any,
) -> "LoadedConfig":
    """Build the configuration from a file, the environment and flags.

    ``file`` is a YAML file, a preset name, the folder of a run to repeat, or data.
    """
    from finetune.config.load import is_config, load_config

    run, files = None, {"data": flags.get("data"), "config": config}
    if file is not None:
        run = find_run(Path(file))
        name = "config" if run or is_config(str(file)) else "data"
        if files[name] is not None:
            raise UsageError(
                f"the {name} was set twice: {file} and --{name} {files[name]}",
                remedy="drop one of them",
            )
        files[name] = str(run.config_file if run else file)
    ignored = ["output_dir", "overwrite"]  # a repeated run gets a new folder
    if flags.get("model") is not None:
        ignored.append("revision")  # of the model of that run
    return load_config(
        file=None if files["config"] is None else str(files["config"]),
        environment=os.environ,
        flags=without_none({**flags, "data": files["data"]}),
        assignments=assignments,
        ignored=ignored if run else (),
    )


def find_run(path: Path) -> RunFolder | None:
    """Return the run in a folder or, for several seeds, the best one. None if it has no run."""
    path = find_latest(path).expanduser()
    is_run = bool(find_several(path)) or RunFolder(path).config_file.is_file()
    return open_run_folder(path, needs_model=False) if is_run else None


def without_none(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set."""
    return {option: value for option, value in flags.items() if value is not None}


def _flag(option: Option) -> Callable[[Command], Command]:
    flag, default = option.flag, option.default
    kind = NAME if option.path else _flag_type(option.type)
    if kind is bool:
        default = option.flag.removeprefix("--") if default else None
        flag, kind = f"{flag}/--no-{option.flag.removeprefix('--')}", None
    if isinstance(kind, click.Choice):  # in the spelling that Click shows
        default = default and default.replace("_", "-")
    note = ", or guessed for a table" if option.is_guessed else ""
    help_text = option.description
    if default is not None:
        help_text += f"  [default: {default}{note}]"
    return click.option(flag, option.name, type=kind, default=None, help=help_text)


def _flag_type(hint: Any, *, has_range: bool = False) -> Any:
    """Convert a type hint to a flag type: a plain type, a choice or a range."""
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        if not has_range:
            return kind
        low, high = bounds
        limits = {"min": low.ge, "max": getattr(high, "le", None)}
        return click.IntRange(**limits) if kind is int else click.FloatRange(**limits)
    if hint in (str | Path, str | Path | None):
        return NAME
    if get_origin(hint) is Literal:
        return click.Choice(list(map(str, get_args(hint))))
    members = [member for member in get_args(hint) if member is not types.NoneType]
    # Options that accept a number or a word are parsed later, with the configuration.
    if len(members) == 1:
        return _flag_type(members[0], has_range=has_range)
    return str if members else hint


config_options = chosen_options(*OPTIONS)
