"""What exports share: packages, example inputs, and a folder that is written whole."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.errors import ModelUnsupported, UsageError
from finetune.files import naming
from finetune.model.load import TextModel, saved_names
from finetune.ownership import OwnFolder
from finetune.tokenization.examples import Inputs, prepare_mask

EXTRAS = {"onnx": ("onnxruntime", "onnx", "onnxscript"), "coreml": ("coremltools",)}


def import_extra(extra: str) -> Any:
    """Import the modules of an extra and return the first; UsageError if one is missing."""
    try:
        with silence():
            first, *_ = map(import_module, EXTRAS[extra])
    except ImportError as error:
        raise UsageError(
            f"this export needs the package {error.name}",
            remedy=f"pip install 'finetune-mps[{extra}]'",
        ) from error
    return first


class _LogitsOnly(nn.Module):
    def __init__(self, text_model: TextModel) -> None:
        super().__init__()
        self.model: nn.Module = text_model.model
        self.takes_4d_mask = text_model.structure.takes_4d_mask

    def forward(self, inputs: Inputs) -> torch.Tensor:
        inputs = {**inputs, "attention_mask": inputs["attention_mask"] != 0}
        prepared = prepare_mask(inputs, takes_4d_mask=self.takes_4d_mask)
        logits: torch.Tensor = self.model(**prepared).logits
        return logits


def trace(
    text_model: TextModel, shape: tuple[int, int], *, dynamic: Mapping[int, torch.export.Dim]
) -> torch.export.ExportedProgram:
    """Return the graph from the tokenizer's inputs, integers [batch, length], to logits."""
    # Without padding, from which some models count positions.
    names, token = text_model.tokenizer.model_input_names, text_model.tokenizer.sep_token_id or 1
    values = {"input_ids": token, "attention_mask": 1}
    example = {name: torch.full(shape, values.get(name, 0)) for name in names}
    shapes = ({name: dict(dynamic) for name in names},)
    return torch.export.export(_LogitsOnly(text_model).eval(), (example,), dynamic_shapes=shapes)


@contextlib.contextmanager
def writing_export(text_model: TextModel, own: OwnFolder, *names: str) -> Iterator[Path]:
    """Yield an empty folder for an exported model; its config and tokenizer are put beside it."""
    names = (*names, *saved_names(text_model))
    with naming(own.path), own.make(), own.replacing("", *names, last=names[-1]) as partial:
        yield partial
        text_model.model.config.save_pretrained(partial)
        text_model.tokenizer.save_pretrained(partial)


@contextlib.contextmanager
def converting(text_model: TextModel, target: str) -> Iterator[None]:
    """Hide what a converter prints; whatever it raises is a ModelUnsupported."""
    try:
        with silence():
            yield
    except Exception as error:
        reason = str(error.__cause__ or error) or type(error).__name__
        name = type(text_model.model).__name__
        raise ModelUnsupported(
            f"{name} can't be converted to {target}: {reason.splitlines()[0]}",
            remedy="use the run's model with transformers",
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
