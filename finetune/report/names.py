"""Names of data and models as a page may show them that others read: without folders."""

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
    """Return the Hub id that the name of a model is, or None for what lies here."""
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


def without_folders(config: Config) -> Config:
    """Return options that name files and folders by the last part of their paths."""
    names = {one.name: without_folder(one.name, one.value_in(config)) for one in OPTIONS.values()}
    return change_options(config, names)


def without_folder(option: str, value: Any) -> Any:
    """Return the value of an option; of one that names a file or folder the last part."""
    if option == "data":
        return name_of_data(value)
    if option == "model":
        return name_of_model(value)
    return Path(value).name if OPTIONS[option].is_path and value else value


def remove_folders(message: str, config: Config) -> str:
    """Return a message that names files by the last part of their paths.

    Args:
        message: A warning of a run.
        config: Its options; their paths are found even where they have spaces.
    """
    for path in (config.data.data, config.data.validation_file, config.data.test_file):
        if path and not path.startswith(HUB_PREFIX):
            message = message.replace(path, Path(path).name)
    return FOLDERS.sub("", message)
