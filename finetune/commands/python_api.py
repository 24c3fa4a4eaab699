"""The functions of the Python API, shown as the commands are."""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from typing import Any

from finetune.commands.progress import showing
from finetune.config.schema import OPTIONS
from finetune.events import Emit, ignore

_HELP = """

It shows how far it is in a notebook and on a terminal, as the command does; with ``progress=True``
everywhere, with ``progress=False`` or an ``emit`` nowhere."""


def shown_live(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that shows its events where someone watches, unless it gets an ``emit``.

    ``progress`` decides in place of whether someone watches.
    """

    @wraps(function)
    def call(
        *arguments: Any, emit: Emit | None = None, progress: bool | None = None, **options: Any
    ) -> Any:
        is_shown = is_watched() if progress is None else progress
        if emit or not is_shown:
            return function(*arguments, emit=emit or ignore, **options)
        with showing(quiet=False, no_progress=False) as show:
            return function(*arguments, emit=show, **options)

    call.__doc__ = f"{getdoc(function)}{_HELP}"
    shape = signature(function)
    # Read by help() and by what completes names in notebooks.
    vars(call)["__signature__"] = shape.replace(parameters=list(_parameters(shape)))
    return call


def _parameters(shape: Signature) -> Iterator[Parameter]:
    """Yield the parameters of a function as it is called, each option by name."""
    for one in shape.parameters.values():
        if one.kind is Parameter.VAR_KEYWORD:
            for option in OPTIONS.values():
                name, kind = option.name, Parameter.KEYWORD_ONLY
                yield Parameter(name, kind, default=option.default, annotation=option.type)
        elif one.name == "emit":
            yield one.replace(default=None, annotation="Emit | None")
            yield one.replace(name="progress", default=None, annotation="bool | None")
        else:
            yield one


def is_watched() -> bool:
    """Return whether someone sees what is shown: in a notebook or on a terminal."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())
