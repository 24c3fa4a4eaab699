"""The model of a run as ONNX: written, and compared with PyTorch in onnxruntime."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.errors import ModelUnsupportedError, UsageError, packages_of, reason_of
from finetune.files import naming, replacing
from finetune.model.load import TextModel
from finetune.ownership import OwnFolder
from finetune.runs.trained import TrainedModel
from finetune.tokenization.examples import Examples, Inputs, prepare_mask

# The file names of the library optimum, so that its classes find the files.
MODEL_FILE = "model.onnx"
QUANTIZED_FILE = "model_quantized.onnx"
_PACKAGES = ("onnxruntime", "onnx", "onnxscript")
# The exporter treats dimensions of size 1, and dimensions of equal size, as constants.
EXAMPLE_SHAPE = (2, 7)


class OnnxModel(nn.Module):
    """An ONNX file as a module: its forward takes and returns the same tensors as the model."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.session = import_runtime().InferenceSession(
            str(file), providers=["CPUExecutionProvider"]
        )
        self.input_names = [value.name for value in self.session.get_inputs()]

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        """Return the logits, float32 of shape [examples, classes], as ``logits``."""
        arrays = {name: inputs[name].numpy() for name in self.input_names}
        return SimpleNamespace(logits=torch.from_numpy(self.session.run(["logits"], arrays)[0]))


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


def import_runtime() -> Any:
    """Import the packages of the extra ``onnx`` and return onnxruntime."""
    try:
        with _silence():
            runtime, *_ = [import_module(package) for package in _PACKAGES]
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        remedy = "pip install onnx onnxruntime onnxscript"
        raise UsageError(f"this export needs the package {error.name}", remedy=remedy) from error
    return runtime


def write_onnx(text_model: TextModel, folder: OwnFolder, *, quantizes: bool) -> None:
    """Write a model as ONNX, with its config and tokenizer, and optionally a second file in int8.

    The inputs are the outputs of the tokenizer, int64 [batch, length]; ``logits`` are float32
    [batch, classes].
    """
    with naming(folder.path), folder.make(), replacing(folder.path, last="config.json") as partial:
        try:
            with _silence():
                _export(text_model, partial)
        except Exception as error:
            if isinstance(error, OSError) or packages_of(error)[-1] == "finetune":
                raise
            name = type(text_model.model).__name__
            raise ModelUnsupportedError(
                f"{name} can't be converted to ONNX: {reason_of(error.__cause__ or error)}",
                remedy="use RUN/model with transformers",
            ) from error
        if quantizes:
            _quantize(partial)
        text_model.model.config.save_pretrained(partial)
        text_model.tokenizer.save_pretrained(partial)
        (folder.path / QUANTIZED_FILE).unlink(missing_ok=True)  # of an earlier export


def _export(text_model: TextModel, folder: Path) -> None:
    """Write the graph from the inputs of the tokenizer to the logits."""
    # Without padding, because some models count positions from the padding.
    names, token = text_model.tokenizer.model_input_names, text_model.tokenizer.sep_token_id or 1
    values = {"input_ids": token, "attention_mask": 1}
    example = {name: torch.full(EXAMPLE_SHAPE, values.get(name, 0)) for name in names}
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=text_model.max_tokens)
    shapes = ({name: {0: batch, 1: length} for name in names},)
    model = _LogitsOnly(text_model).eval()
    traced = torch.export.export(model, (example,), dynamic_shapes=shapes)
    program = torch.onnx.export(traced, input_names=names, output_names=["logits"])
    assert program is not None
    program.save(folder / MODEL_FILE)


def _quantize(folder: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exported = onnx.load(folder / MODEL_FILE)
    # The shapes of transposed weights from the exporter contradict the inferred shapes.
    del exported.graph.value_info[:]
    with _silence():
        quantize_dynamic(exported, folder / QUANTIZED_FILE, weight_type=QuantType.QInt8)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide the progress of the converter and its advice on versions and packages."""
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def verify(trained: TrainedModel, exported: nn.Module, examples: Examples) -> dict[str, Any]:
    """Compare the predictions of a run on the CPU in fp32, in PyTorch and in onnxruntime.

    ``same_labels`` is the fraction of the rows that get the same labels, None for a regression. The
    difference of logits is relative to the largest logit, if that is beyond 1 or a value.
    """
    task = trained.text_model.task
    logits, exported_logits = (
        replace(trained, predictor=replace(trained.predictor, model=model)).logits(examples)
        for model in (trained.predictor.model, exported)
    )
    labels, exported_labels = (
        task.read_logits(values).predicted.reshape(len(logits), -1)
        for values in (logits, exported_logits)
    )
    same = float((labels == exported_labels).all(axis=1).mean()) if task.class_names else None
    largest = max(np.abs(logits).max(), 1.0 if task.class_names else np.finfo(np.float32).tiny)
    difference = np.abs(logits - exported_logits).max() / largest
    return {
        "samples": len(logits),
        "same_labels": same,
        "largest_logit_difference": float(difference),
        "metrics": task.score(exported_logits, examples.labels).metrics,
        "pytorch_metrics": task.score(logits, examples.labels).metrics,
    }
