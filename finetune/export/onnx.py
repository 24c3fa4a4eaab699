"""A run's model as ONNX: written, and compared with PyTorch in onnxruntime."""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.errors import ModelUnsupported
from finetune.export.folder import example_inputs, import_extra, silence, writing_export
from finetune.model.load import TextModel
from finetune.ownership import OwnFolder
from finetune.runs.trained import TrainedModel
from finetune.tasks.base import Task
from finetune.tokenization.examples import Examples

# The names that Hugging Face's optimum gives these files, so that its classes find them.
MODEL_FILE = "model.onnx"
QUANTIZED_FILE = "model_quantized.onnx"
# Dimensions of size 1 and equal ones would be taken for constants.
EXAMPLE_SHAPE = (2, 7)
TIMED_TEXTS = 100


@dataclass(frozen=True)
class Verification:
    """An exported model beside the run's, in fp32 on the CPU, on the same rows.

    Args:
        same_labels: Fraction of the rows that get the same labels, in 0..1.
        largest_logit_difference: Relative to the largest logit, if that is beyond 1.
        milliseconds_per_text: The median at batch size 1.
    """

    samples: int
    same_labels: float
    largest_logit_difference: float
    metrics: dict[str, float]
    pytorch_metrics: dict[str, float]
    milliseconds_per_text: float
    pytorch_milliseconds_per_text: float


class OnnxModel(nn.Module):
    """A model's ONNX file in the model's place: its forward takes and gives the same tensors."""

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


def import_runtime() -> Any:
    """Return the module ``onnxruntime``; UsageError without the extra ``onnx``."""
    return import_extra("onnxruntime", "onnx", "onnxscript", extra="onnx")


def write_onnx(text_model: TextModel, own: OwnFolder, *, quantizes: bool) -> None:
    """Write a model as ONNX, with its config and tokenizer, and maybe a second file in int8.

    Batch and length are dynamic. Inputs are those of the tokenizer, int64 of shape [batch, length],
    the output ``logits`` float32 of shape [batch, classes].
    """
    model: nn.Module = text_model.model
    model.eval()
    example = example_inputs(text_model, *EXAMPLE_SHAPE)
    names = list(example)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=text_model.max_tokens)
    files = [MODEL_FILE, QUANTIZED_FILE][: 1 + quantizes]
    with writing_export(text_model, own, *files) as partial, silence():
        try:
            program = torch.onnx.export(
                _Logits(model, names),
                tuple(example.values()),
                dynamo=True,
                dynamic_shapes={"inputs": ({0: batch, 1: length},) * len(names)},
                input_names=names,
                output_names=["logits"],
            )
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ModelUnsupported(
                f"PyTorch can't export {type(model).__name__} to ONNX: {reason}",
                remedy="use the model in its run folder with transformers",
            ) from error
        assert program is not None
        program.save(partial / MODEL_FILE)
        if quantizes:
            import onnx
            from onnxruntime.quantization import QuantType, quantize_dynamic

            graph = onnx.load(partial / MODEL_FILE)
            # The exporter's shapes of transposed weights contradict those that are inferred.
            del graph.graph.value_info[:]
            quantize_dynamic(graph, partial / QUANTIZED_FILE, weight_type=QuantType.QInt8)


def verify(trained: TrainedModel, exported: nn.Module, examples: Examples) -> Verification:
    """Compare the predictions and the speed of a run's model with those of its export."""
    models, task = (trained.predictor.model, exported), trained.text_model.task
    logits, exported_logits = (
        replace(trained, predictor=replace(trained.predictor, model=model)).logits(examples)
        for model in models
    )
    is_same = map(dict.__eq__, _labels(task, logits), _labels(task, exported_logits))
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for index in range(min(TIMED_TEXTS, len(examples.lengths))):
            inputs = examples.inputs_of(np.array([index]), int(examples.lengths[index]))
            for model, own in zip(models, seconds, strict=True):  # in turn: other load varies
                started = time.perf_counter()
                model(**inputs)
                own.append(time.perf_counter() - started)
    return Verification(
        samples=len(logits),
        same_labels=statistics.mean(map(float, is_same)),
        largest_logit_difference=float(
            np.abs(logits - exported_logits).max() / max(1.0, np.abs(logits).max())
        ),
        metrics=task.score(exported_logits, examples.labels).metrics,
        pytorch_metrics=task.score(logits, examples.labels).metrics,
        milliseconds_per_text=1000 * statistics.median(seconds[1]),
        pytorch_milliseconds_per_text=1000 * statistics.median(seconds[0]),
    )


def _labels(task: Task, logits: NDArray[np.float32]) -> list[dict[str, Any]]:
    """Return each prediction without its numbers."""
    return [
        {name: one for name, one in prediction.result.items() if not isinstance(one, float)}
        for prediction in task.predict([""] * len(logits), logits)
    ]
