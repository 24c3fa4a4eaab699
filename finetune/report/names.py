"""Names of data and models as a page may show them that others read: without folders."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from finetune.config.schema import Config
from finetune.data.load import HUB_PREFIX
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
    data, model, output, cache = config.data, config.model, config.output, config.cache
    files = _last_parts(data, "data_dir", "validation_file", "test_file", "label_names")
    return replace(
        config,
        data=replace(data, data=name_of_data(data.data), **files),
        model=replace(model, model=name_of_model(model.model)),
        output=replace(output, **_last_parts(output, "output_dir")),
        cache=replace(cache, **_last_parts(cache, "cache_dir")),
    )


def _last_parts(section: Any, *options: str) -> dict[str, Any]:
    values = {option: getattr(section, option) for option in options}
    return {option: value and Path(value).name for option, value in values.items()}


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
