"""The folder of an export: written whole, and nothing replaced that is not an export."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import NotWritten, UsageError
from finetune.files import writing_folder
from finetune.model.load import TextModel


@contextlib.contextmanager
def writing_export(text_model: TextModel, folder: Path, *, name: str) -> Iterator[Path]:
    """Yield an empty folder for an exported model; its config and tokenizer are put beside it.

    An earlier export, which has a file of this name, is replaced.
    """
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} is or holds the current folder, and an export replaces what is there",
            remedy="name a new folder with --output-dir",
        )
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_empty and not (folder / name).exists():
        raise UsageError(
            f"{folder} holds something that no export wrote",
            remedy="name a new folder with --output-dir",
        )
    try:
        with writing_folder(folder) as partial:
            yield partial
            text_model.model.config.save_pretrained(partial)
            text_model.tokenizer.save_pretrained(partial)
    except OSError as error:
        raise NotWritten(
            f"{folder} can't be written: {error.strerror or error}",
            remedy="choose another folder with --output-dir",
        ) from error


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide a converter's progress and its advice on versions and packages."""
    logging.disable(logging.WARNING)
    output = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)
