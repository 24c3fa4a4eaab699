"""The Python API: commands as functions, with in-memory tables, progress, warnings and errors."""

import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from finetune import events
from finetune.commands import console
from finetune.config.schema import OPTIONS
from finetune.data import TEMPORARY
from finetune.distributed import read_launch
from finetune.errors import ConfigurationError, FinetuneBaseError, UsageError, explained

FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")
COMMAND = re.compile(r"(finetune [a-z].*)")
WAITING = re.compile(rf"\S*{TEMPORARY}\w+/table-\w+\.parquet")
SPLITS = {"train": "data", "validation": "validation_file", "test": "test_file"}
_HELP = """

Progress is shown in notebooks and on terminals. ``progress=True`` shows it everywhere;
``progress=False`` or an ``emit`` hides it. Warnings are Python warnings, and the ``warnings``
attribute of the results lists them."""


def as_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command as a Python API function, with ``emit`` and ``progress``."""
    shape = signature(function)
    public = _public_signature(shape)

    @wraps(function)
    def call(
        *arguments: Any,
        emit: events.Emit | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        names = {*public.parameters, *OPTIONS}
        shown, messages = emit or events.ignore, list[str]()

        def pass_on(event: events.Event) -> None:
            if isinstance(event, events.WarningMessage):
                remedy = f" ({event.remedy})" if event.remedy else ""
                messages.append(_with_arguments(f"{event.message}{remedy}", names))
                if read_launch().rank == 0:
                    warnings.warn(messages[-1], stacklevel=_count_frames())
            elif isinstance(event, events.Info):
                event = events.Info(_with_arguments(event.message, names))
            if emit or not isinstance(event, events.WarningMessage):
                shown(event)

        with _errors_explained(names), ExitStack() as stack:
            if function.__name__ != "compare":  # which does not import torch
                from finetune.devices.base import torch_state_kept

                stack.enter_context(torch_state_kept())
            if not emit and (console.is_watched() if progress is None else progress):
                view = console.showing(quiet=False, no_progress=False)
                shown = stack.enter_context(view)
            stack.enter_context(events.sent_to(pass_on))
            arguments, options = _with_files(shape, arguments, options, stack)
            _check_arguments(shape, arguments, options)
            result = function(*arguments, **options)
        if hasattr(type(result), "warnings"):
            object.__setattr__(result, "warnings", tuple(messages))  # most results are frozen
        return result

    call.__doc__ = f"{getdoc(function)}{_HELP}"
    vars(call)["__signature__"] = public
    return call


def _public_signature(shape: Signature) -> Signature:
    """Return a signature with all options, for help() and completion in notebooks."""
    more = {"emit": None, "progress": None}
    parameters = [item for name, item in shape.parameters.items() if name not in more]
    if parameters[-1].kind is Parameter.VAR_KEYWORD:
        parameters.pop()
        known = shape.parameters.keys()
        more |= {name: option.default for name, option in OPTIONS.items() if name not in known}
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in more.items()
    ]
    return shape.replace(parameters=parameters)


@contextmanager
def _errors_explained(names: Container[str]) -> Iterator[None]:
    """Rewrite error messages for Python, and explain system errors."""
    try:
        with explained():
            yield
    except FinetuneBaseError as error:
        error.message = _with_arguments(error.message, names)
        error.remedy = _with_arguments(error.remedy, names)
        error.args, error.__notes__ = (error.message,), [f"try: {error.remedy}"]
        raise


def _count_frames() -> int:
    """Return the number of package frames above the user's frame."""
    frame, count = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "finetune":
        frame, count = frame.f_back, count + 1
    return count


def _with_files(
    shape: Signature, arguments: tuple[Any, ...], options: dict[str, Any], stack: ExitStack
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace in-memory tables by temporary files, which a run moves into its folder."""
    from finetune.data.in_memory import is_table, write_table
    from finetune.data.packed import SPLIT_BY_WORD

    if "file" in shape.parameters and arguments and is_table(arguments[0]):
        options, arguments = {"data": arguments[0], **options}, arguments[1:]
    if isinstance(splits := options.get("data"), Mapping) and _are_splits(splits):
        known = (name for name in reversed([*splits]) if str(name).casefold() in SPLIT_BY_WORD)
        names = {SPLIT_BY_WORD[str(name).casefold()]: name for name in known}
        if "train" not in names:
            raise ConfigurationError(
                f"no training split in {', '.join(map(str, splits))}",
                remedy="name the training split train",
            )
        options |= {SPLITS[split]: splits[name] for split, name in names.items()}
        if others := ", ".join(str(name) for name in splits if name not in names.values()):
            events.emit(events.WarningMessage(f"these splits are ignored: {others}"))
    classes = options.get("classes")
    if isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes):
        if several := next((name for name in classes if "," in name), None):
            remedy = "pass class_descriptions, a dict with the description of each class"
            raise UsageError(f"class name {several!r} contains a comma", remedy=remedy)
        options |= {"classes": ",".join(classes)}
    tables = [name for name, option in OPTIONS.items() if option.takes_table]
    if tables := [name for name in tables if is_table(options.get(name))]:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=TEMPORARY)))
        texts = [name for name in ("data", "unlabeled") if name in tables]
        options |= {name: _as_rows(options[name]) for name in texts}
        if "class_descriptions" in tables:
            options |= {"class_descriptions": _as_descriptions(options["class_descriptions"])}
        options |= {name: write_table(options[name], folder) for name in tables}
    return arguments, options


def _as_rows(table: Any) -> Any:
    """Convert a list of texts to a table. Return other tables unchanged."""
    is_list = isinstance(table, list | tuple) and all(isinstance(text, str) for text in table)
    return {"text": [*table]} if is_list else table


def _as_descriptions(table: Any) -> Any:
    """Convert a dict of descriptions by class to a table. Return other tables unchanged."""
    if not isinstance(table, Mapping) or {*table} & {"class", "description"}:
        return table
    listed = {name: [text] if isinstance(text, str) else text for name, text in table.items()}
    rows = [(name, text) for name, texts in listed.items() for text in texts]
    return {"class": [name for name, _ in rows], "description": [text for _, text in rows]}


def _are_splits(tables: Mapping[Any, Any]) -> bool:
    """Return whether a mapping contains splits, not columns or texts by label."""
    from finetune.data.packed import SPLIT_BY_WORD

    is_named = all(str(name).casefold() in SPLIT_BY_WORD for name in tables)
    return is_named or any(
        hasattr(table, "column_names") or hasattr(table, "columns") for table in tables.values()
    )


def _with_arguments(text: str, names: Container[str]) -> str:
    """Rewrite a message for Python: flags become arguments, temporary files "the table"."""
    text = WAITING.sub("the table", text)

    def argument(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name in names:
            return name
        positive = name.removeprefix("no_")
        return f"{positive}=False" if positive in names else flag[0]

    # The rest is shell input and stays literal.
    before, *after = COMMAND.split(text, maxsplit=1)
    return FLAG.sub(argument, before) + "".join(after)


def _check_arguments(shape: Signature, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Raise ``ConfigurationError`` for arguments of the wrong type, except options."""
    from finetune.config.load import check_type

    for name, value in shape.bind(*arguments, **options).arguments.items():
        parameter = shape.parameters[name]
        if parameter.kind is not Parameter.VAR_KEYWORD and name != "texts":
            for item in value if parameter.kind is Parameter.VAR_POSITIONAL else [value]:
                check_type(parameter.annotation, item, words=name)
