"""A run's model as ONNX: written, and compared with PyTorch in onnxruntime."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from finetune.export.folder import converting, import_extra, silence, trace, writing_export
from finetune.model.load import TextModel
from finetune.ownership import OwnFolder
from finetune.runs.trained import TrainedModel
from finetune.tokenization.examples import Examples

# The names that Hugging Face's optimum gives these files, so that its classes find them.
MODEL_FILE = "model.onnx"
QUANTIZED_FILE = "model_quantized.onnx"
# Dimensions of size 1 and equal ones would be taken for constants.
EXAMPLE_SHAPE = (2, 7)


@dataclass(frozen=True)
class Verification:
    """An exported model beside the run's, in fp32 on the CPU, on the same rows."""

    samples: int
    same_labels: float  # the fraction of the rows that get them
    largest_logit_difference: float  # relative to the largest logit, if that is beyond 1
    metrics: dict[str, float]
    pytorch_metrics: dict[str, float]


class OnnxModel(nn.Module):
    """A model's ONNX file in the model's place: its forward takes and gives the same tensors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        runtime = import_extra("onnx")
        self.session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        self.input_names = [one.name for one in self.session.get_inputs()]

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        """Return the logits, float32 of shape [examples, classes], as ``logits``."""
        arrays = {name: inputs[name].numpy() for name in self.input_names}
        return SimpleNamespace(logits=torch.from_numpy(self.session.run(["logits"], arrays)[0]))


def write_onnx(text_model: TextModel, own: OwnFolder, *, quantizes: bool) -> None:
    """Write a model as ONNX, with its config and tokenizer, and maybe a second file in int8.

    Inputs are the tokenizer's, int64 [batch, length]; ``logits`` are float32 [batch, classes].
    """
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=text_model.max_tokens)
    files = [MODEL_FILE, QUANTIZED_FILE][: 1 + quantizes]
    with writing_export(text_model, own, *files) as partial:
        with converting(text_model, "ONNX"):
            graph = trace(text_model, EXAMPLE_SHAPE, dynamic={0: batch, 1: length})
            names = text_model.tokenizer.model_input_names
            program = torch.onnx.export(graph, input_names=names, output_names=["logits"])
        assert program is not None
        program.save(partial / MODEL_FILE)
        if quantizes:
            import onnx
            from onnxruntime.quantization import QuantType, quantize_dynamic

            exported = onnx.load(partial / MODEL_FILE)
            # The exporter's shapes of transposed weights contradict those that are inferred.
            del exported.graph.value_info[:]
            with silence():
                quantize_dynamic(exported, partial / QUANTIZED_FILE, weight_type=QuantType.QInt8)


def verify(trained: TrainedModel, exported: nn.Module, examples: Examples) -> Verification:
    """Compare the predictions of a run's model with those of its export."""
    models, task = (trained.predictor.model, exported), trained.text_model.task
    logits, exported_logits = (
        replace(trained, predictor=replace(trained.predictor, model=model)).logits(examples)
        for model in models
    )
    is_same = np.ones(len(logits), np.bool_)
    if task.class_names:
        labels, exported_labels = (
            task.read_logits(one).predicted for one in (logits, exported_logits)
        )
        is_same = (labels == exported_labels).reshape(len(logits), -1).all(axis=1)
    return Verification(
        samples=len(logits),
        same_labels=float(is_same.mean()),
        largest_logit_difference=float(
            np.abs(logits - exported_logits).max() / max(1.0, np.abs(logits).max())
        ),
        metrics=task.score(exported_logits, examples.labels).metrics,
        pytorch_metrics=task.score(logits, examples.labels).metrics,
    )
