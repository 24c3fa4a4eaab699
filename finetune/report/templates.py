"""The template engine of all pages, with filters for formatting and removing folders."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from finetune.config.schema import HUB_PREFIX, OPTIONS, Config
from finetune.files import escape_controls
from finetune.tasks.tables import capitalize, duration, format_rate

FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.\.?)?/(?:[^/\s]+/)+")


def hub_id(model: str) -> str | None:
    """Return the Hub ID of a model, or None for a local model."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    from finetune.model.source import MINILM, MINILM_REPOSITORY

    if model == MINILM:
        return MINILM_REPOSITORY
    try:
        validate_repo_id(model)
    except HFValidationError:
        return None
    return None if Path(model).exists() else model


def without_folder(option: str, value: Any) -> Any:
    """Return the value of an option or, for a file or folder, the last part of its path."""
    is_path = OPTIONS[option].is_path
    if option == "data":
        is_path = not value.startswith(HUB_PREFIX)
    elif option == "model":
        is_path = hub_id(value) is None
    return Path(value).name if is_path and value else value


def remove_folders(message: str, config: Config) -> str:
    """Shorten paths in a warning to their last part, including paths with spaces."""
    for path in (config.data.data, config.data.validation_file, config.data.test_file):
        if path and not path.startswith(HUB_PREFIX):
            message = message.replace(path, Path(path).name)
    return FOLDERS.sub("", message)


def mark_code(text: str) -> Markup:
    """Convert a sentence with code between backticks to HTML."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(escape_controls(text)))))


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
TEMPLATES.filters |= {
    "capitalize": capitalize,
    "duration": duration,
    "rate": format_rate,
    "code": mark_code,
}
