"""Which folder a run gets: the one that is named, or the next of its default name in ``runs``."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from finetune.config.schema import Config, mode_of
from finetune.runs.folder import RUNS_FOLDER, RunFolder, next_free_folder


def named_folder(config: Config) -> Path | None:
    """Return the folder that ``--output-dir`` names."""
    name = config.output.output_dir
    return None if name is None else Path(name).expanduser()


def default_name(config: Config) -> str:
    """Return the name of a run folder, such as ``trec-minilm-full``."""
    from finetune.data.load import source_name

    parts = source_name(config.data.data), Path(config.model.model).name, mode_of(config.model)
    return "-".join(parts)


def find_named(name: str) -> Iterator[Path]:
    """Yield the folders that have a default name, with a number behind it or without."""
    numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
    return (path for path in RUNS_FOLDER.glob("*") if numbered.fullmatch(path.name))


def reserve(config: Config) -> AbstractContextManager[RunFolder]:
    """Create and lock the folder of a new run."""
    path = named_folder(config)
    if path is None:
        return RunFolder.create_next(RUNS_FOLDER, default_name(config))
    return RunFolder(path).create(overwrite=config.output.overwrite)


def find_free(config: Config) -> Path:
    """Return the folder that a run would get, having made sure that it may be written."""
    path = named_folder(config)
    if path is None:
        return next_free_folder(RUNS_FOLDER, default_name(config))
    RunFolder(path).check_can_create(overwrite=config.output.overwrite)
    return path
