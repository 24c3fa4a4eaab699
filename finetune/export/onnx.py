"""A model as ONNX, and what runs it: onnxruntime."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from finetune.errors import ModelUnsupported, UsageError
from finetune.export.folder import silence, writing_export
from finetune.model.load import TextModel

# The names that Hugging Face's optimum gives these files, so that its classes find them.
MODEL_FILE = "model.onnx"
QUANTIZED_FILE = "model_quantized.onnx"
# Dimensions of size 1 and equal ones would be taken for constants.
EXAMPLE_SHAPE = (2, 7)


class OnnxModel(nn.Module):
    """A model's ONNX file in the model's place: its forward takes and gives the same tensors.

    Args:
        file: As :func:`write_onnx` wrote it.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        runtime = import_runtime()
        self.session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.input_names = [one.name for one in self.session.get_inputs()]

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        """Return the logits, float32 of shape [examples, classes], as ``logits``."""
        arrays = {name: inputs[name].numpy() for name in self.input_names}
        return SimpleNamespace(logits=torch.from_numpy(self.session.run(["logits"], arrays)[0]))


class _Logits(nn.Module):
    """Takes a model's inputs by position and returns its logits alone."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def write_onnx(text_model: TextModel, folder: Path, *, quantizes: bool) -> None:
    """Write a model as ONNX, with its config and tokenizer, whole or not at all.

    Batch and length are dynamic. Inputs are those of the tokenizer, int64 of shape [batch, length],
    the output ``logits`` float32 of shape [batch, classes].

    Args:
        text_model: On the CPU; left in evaluation mode.
        folder: What an earlier export left there is replaced.
        quantizes: Write int8 weights too, in a file of their own.

    Raises:
        UsageError: If the folder holds something else.
        ModelUnsupported: If PyTorch can't export the model.
    """
    with writing_export(text_model, folder, name=MODEL_FILE) as partial:
        _write_model(text_model, partial / MODEL_FILE)
        if quantizes:
            _write_quantized(partial / MODEL_FILE, partial / QUANTIZED_FILE)


def import_runtime() -> Any:
    """Return the module ``onnxruntime``.

    Raises:
        UsageError: If a package of the extra ``onnx`` is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"export to ONNX needs the package {error.name}",
            remedy="pip install 'finetune-mps[onnx]'",
        ) from error
    return onnxruntime


def _write_model(text_model: TextModel, file: Path) -> None:
    model: nn.Module = text_model.model
    model.eval()
    names = list(text_model.tokenizer.model_input_names)
    rows, columns = EXAMPLE_SHAPE
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=text_model.max_tokens)
    sizes = {0: batch, 1: length}
    # Any token will do but padding, which positions may be counted from.
    example = {name: torch.zeros(rows, columns, dtype=torch.long) for name in names}
    example["input_ids"] += text_model.tokenizer.sep_token_id or 1
    example["attention_mask"] += 1
    try:
        with silence():
            program = torch.onnx.export(
                _Logits(model, names),
                tuple(example.values()),
                dynamo=True,
                dynamic_shapes={"inputs": (sizes,) * len(names)},
                input_names=names,
                output_names=["logits"],
            )
    except torch.onnx.OnnxExporterError as error:
        # PyTorch's own text only says at which step.
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ModelUnsupported(
            f"PyTorch can't export {type(model).__name__} to ONNX: {reason}",
            remedy="use the model in its run folder with transformers",
        ) from error
    assert program is not None
    program.save(file)


def _write_quantized(model: Path, file: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(model)
    # Shapes that the exporter wrote of transposed weights contradict those that are inferred.
    del graph.graph.value_info[:]
    with silence():
        quantize_dynamic(graph, file, weight_type=QuantType.QInt8)
