"""Names of data and models without folders, for pages that may be published."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from finetune.config.schema import OPTIONS, Config
from finetune.data.source import HUB_PREFIX
from finetune.model.source import MINILM, MINILM_REPOSITORY

FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.\.?)?/(?:[^/\s]+/)+")


def hub_id(model: str) -> str | None:
    """Return the Hub id of a model, or None for a local one."""
    if model == MINILM:
        return MINILM_REPOSITORY
    try:
        validate_repo_id(model)
    except HFValidationError:
        return None
    return None if Path(model).exists() else model


def without_folder(option: str, value: Any) -> Any:
    """Return the value of an option; of a file or folder the last part of the path."""
    is_path = OPTIONS[option].is_path
    if option == "data":
        is_path = not value.startswith(HUB_PREFIX)
    elif option == "model":
        is_path = hub_id(value) is None
    return Path(value).name if is_path and value else value


def remove_folders(message: str, config: Config) -> str:
    """Return a warning of a run with the last parts of paths, also of those with spaces."""
    for path in (config.data.data, config.data.validation_file, config.data.test_file):
        if path and not path.startswith(HUB_PREFIX):
            message = message.replace(path, Path(path).name)
    return FOLDERS.sub("", message)
