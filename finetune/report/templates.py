"""The template engine of all pages, and how values are formatted."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from finetune.escaping import escape_controls
from finetune.tasks.tables import format_number


def capitalize(text: str) -> str:
    """Return a text that begins with a capital, the rest as it is: ``Macro F1``."""
    return text[:1].upper() + text[1:]


def format_value(value: Any) -> str:
    """Format a label, a number or the value of an option for people."""
    match value:
        case None:
            return "–"
        case bool():
            return "on" if value else "off"
        case float():
            return format_number(value)
        case list():
            return ", ".join(map(format_value, value)) or "none"
        case dict():
            return ", ".join(f"{key} {one}" for key, one in value.items())
    return str(value)


def duration(seconds: float) -> str:
    """Return a time such as ``9.5 s``, ``24 min 13 s`` or ``2 h 14 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_seconds} s"


def _escape_text(value: Any) -> Any:
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return escape_controls(value) if is_text else value


TEMPLATES = Environment(
    loader=PackageLoader("finetune", "report"),
    autoescape=True,
    finalize=_escape_text,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"capitalize": capitalize, "duration": duration}
