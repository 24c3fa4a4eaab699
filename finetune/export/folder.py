"""What exports share: packages, example inputs, and a folder that is written whole."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from finetune.errors import UsageError
from finetune.files import naming
from finetune.model.load import TextModel, saved_names
from finetune.ownership import OwnFolder


def import_extra(*modules: str, extra: str) -> Any:
    """Import the modules of an extra and return the first; UsageError if one is missing."""
    try:
        with silence():
            first, *_ = map(import_module, modules)
    except ImportError as error:
        raise UsageError(
            f"this export needs the package {error.name}",
            remedy=f"pip install 'finetune-mps[{extra}]'",
        ) from error
    return first


def example_inputs(text_model: TextModel, *shape: int) -> dict[str, torch.Tensor]:
    """Return int64 inputs without padding, from which some models count positions."""
    inputs = {
        name: torch.zeros(shape, dtype=torch.long)
        for name in text_model.tokenizer.model_input_names
    }
    inputs["input_ids"] += text_model.tokenizer.sep_token_id or 1
    inputs["attention_mask"] += 1
    return inputs


@contextlib.contextmanager
def writing_export(text_model: TextModel, own: OwnFolder, *names: str) -> Iterator[Path]:
    """Yield an empty folder for an exported model; its config and tokenizer are put beside it.

    ``names`` are files that are written. An earlier export is replaced.
    """
    names = (*names, *saved_names(text_model))
    with naming(own.path), own.make(), own.replacing("", *names, last=names[-1]) as partial:
        yield partial
        text_model.model.config.save_pretrained(partial)
        text_model.tokenizer.save_pretrained(partial)


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
