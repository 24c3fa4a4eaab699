"""Escapes control characters and direction marks in text from data."""

import re

# Direction marks, embeddings, overrides, isolates, and the line separators in the same range.
_DIRECTION = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION}\ud800-\udfff]")
_IN_SINGLE_LINE = re.compile(f"{_IN_LINES.pattern}|[\t\n]")


def escape_controls(text: str) -> str:
    r"""Return a text with codes for control characters and direction marks; keep lines and tabs.

    >>> escape_controls("a\x1b[2J\n\u202eb")
    'a\\u001b[2J\n\\u202eb'
    """
    return _IN_LINES.sub(_code, text)


def escape_line(text: str) -> str:
    r"""Return a text as one line, with codes for control characters and direction marks.

    >>> escape_line("a\tb\r\n")
    'a\\u0009b\\u000d\\u000a'
    """
    return _IN_SINGLE_LINE.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
