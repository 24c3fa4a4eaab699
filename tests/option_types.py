"""Writes the options of the schema into ``finetune/__init__.pyi``, as ``make types`` does."""

import json
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import finetune
from finetune.config.schema import OPTIONS

STUB = Path(finetune.__file__).with_suffix(".pyi")
BLOCK = re.compile(r"class Options\(TypedDict, total=False\):\n(    .*\n|\n)+", re.MULTILINE)


def make_options() -> str:
    """Return the class ``Options`` with the types of all options."""
    lines = ["class Options(TypedDict, total=False):"]
    for option in OPTIONS.values():
        words = _spell(option.type)
        words = words.replace("str", "AnyPath") if option.path else words
        if option.takes_table:
            words = words.replace("AnyPath", "AnyPath | Table")
        if option.name == "classes":
            words = words.replace("str", "str | Sequence[str]")
        lines.append(f"    {option.name}: {words}")
    return "\n".join(lines) + "\n\n"


def make_stub() -> str:
    """Return the stub with the options of the schema."""
    return BLOCK.sub(make_options(), STUB.read_text(encoding="utf-8"), count=1)


def _spell(hint: Any) -> str:
    if hint is types.NoneType:
        return "None"
    if get_origin(hint) is Annotated:
        return _spell(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(json.dumps, get_args(hint)))}]"
    members = [_spell(member) for member in get_args(hint)]
    return " | ".join(members) or str(hint.__name__)


if __name__ == "__main__":
    STUB.write_text(make_stub(), encoding="utf-8")
