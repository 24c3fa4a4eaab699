"""A configuration file to start from, which explains its options."""

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from finetune.config.schema import Config
from finetune.errors import UsageError

MAX_LINE = 100


def make_starter(values: Mapping[str, Any], *, notes: Mapping[str, str], heading: str) -> str:
    """Return a YAML configuration that explains its options and shows defaults as comments.

    It has the options of ``values``. A note is added to the help of its option.
    """
    parts = [_comment(heading, indent="")]
    for name, section in get_type_hints(Config).items():
        entries = [
            _entry(option, values[option.name], note=notes.get(option.name, ""))
            for option in fields(section)
            if option.name in values
        ]
        if entries:
            parts.append(f"{name}:\n" + "\n".join(entries))
    return "\n".join(parts)


def check_is_new(path: Path) -> None:
    """Raise ``UsageError`` if a file exists, before work whose result it could not take."""
    if path.exists():
        raise _exists(path)


def write_new_file(path: Path, text: str) -> None:
    """Write a file; raise ``UsageError`` if it exists or may not be there."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        message = f"{path} can't be written: {error.strerror}"
        raise UsageError(message, remedy="name a file in a writable folder") from error
    try:
        with file:
            file.write(text)
    except OSError as error:
        path.unlink()
        # A full disk is reported by a file's number alone.
        error.filename = str(path)
        raise


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} already exists", remedy="delete it, or name another file")


def _entry(option: Field[Any], value: Any, *, note: str) -> str:
    line = yaml.safe_dump({option.name: value}, allow_unicode=True, width=sys.maxsize)
    return _comment(f"{option.metadata['help']} {note}", indent="  ") + textwrap.indent(
        line, "  # " if value == option.default else "  "
    )


def _comment(text: str, *, indent: str) -> str:
    lines = textwrap.wrap(text, width=MAX_LINE - len(indent) - 2, break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)
