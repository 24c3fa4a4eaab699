"""How pages are rendered, and how they write numbers."""

from jinja2 import Environment, PackageLoader, StrictUndefined


def percent(share: float) -> str:
    """Return a share of 0..1 in percent, such as ``97.2 %``."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a time such as ``9.5 s``, ``24 min 13 s`` or ``2 h 14 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_seconds} s"


TEMPLATES = Environment(
    loader=PackageLoader("finetune", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"percent": percent, "duration": duration}
