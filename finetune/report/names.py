"""Names of data and models without folders, for pages that may be published."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from finetune.config.schema import OPTIONS, Config, change_options
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


def name_of_model(model: str) -> str:
    """Return the name of a model; of a folder its last part."""
    return model if hub_id(model) else Path(model).name


def name_of_data(data: str) -> str:
    """Return the name of a source of data; of a file its name."""
    return data if data.startswith(HUB_PREFIX) else Path(data).name


def without_folder(option: str, value: Any) -> Any:
    """Return the value of an option; of a file or folder the last part of the path."""
    if option == "data":
        return name_of_data(value)
    if option == "model":
        return name_of_model(value)
    return Path(value).name if OPTIONS[option].is_path and value else value


def without_folders(config: Config) -> Config:
    """Return a configuration whose files and folders are the last parts of their paths."""
    values = {name: option.value_in(config) for name, option in OPTIONS.items()}
    names = {name: without_folder(name, value) for name, value in values.items()}
    return change_options(config, names)


def remove_folders(message: str, config: Config) -> str:
    """Return a warning of a run with the last parts of paths, also of those with spaces."""
    for path in (config.data.data, config.data.validation_file, config.data.test_file):
        if path and not path.startswith(HUB_PREFIX):
            message = message.replace(path, Path(path).name)
    return FOLDERS.sub("", message)
