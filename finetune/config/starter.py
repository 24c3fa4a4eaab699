"""A configuration file to start from, which explains its options."""

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

import yaml

from finetune.config.schema import Config

LONGEST_LINE = 100


def make_starter(values: Mapping[str, Any], *, notes: Mapping[str, str], heading: str) -> str:
    """Return a YAML configuration that explains its options and shows defaults as comments.

    Args:
        values: By option; those that are not there are left out.
        notes: What is said of an option beyond its help.
        heading: What is said of the file.
    """
    return "\n".join(
        [
            _comment(heading, indent=""),
            *(
                f"{section.name}:\n" + "\n".join(entries)
                for section in fields(Config)
                if (entries := _entries(section, values, notes))
            ),
        ]
    )


def _entries(section: Field[Any], values: Mapping[str, Any], notes: Mapping[str, str]) -> list[str]:
    return [
        _entry(option, values[option.name], note=notes.get(option.name, ""))
        for option in fields(section.type)  # type: ignore[arg-type]
        if option.name in values
    ]


def _entry(option: Field[Any], value: Any, *, note: str) -> str:
    line = yaml.safe_dump({option.name: value}, allow_unicode=True, width=sys.maxsize)
    return _comment(f"{option.metadata['help']} {note}", indent="  ") + textwrap.indent(
        line, "  # " if value == option.default else "  "
    )


def _comment(text: str, *, indent: str) -> str:
    start = f"{indent}# "
    lines = textwrap.wrap(
        text,
        width=LONGEST_LINE,
        initial_indent=start,
        subsequent_indent=start,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"
