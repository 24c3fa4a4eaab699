"""A run's model as a Core ML program, and what can be checked of it without a Mac."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import FinetuneError
from finetune.export.folder import converting, import_extra, silence, trace, writing_export
from finetune.model.load import TextModel
from finetune.ownership import OwnFolder

MODEL_FILE = "model.mlpackage"
# PyTorch takes a length of 1 for a constant.
MIN_LENGTH = 2
EXAMPLE_TOKENS = 7
# What DeBERTa computes from its relative positions alone is the same for all texts.
FOLDED = re.compile(r"rel_embeddings|\bencoder\.LayerNorm|pos_(key_|query_|q_)?proj")


def write_coreml(text_model: TextModel, own: OwnFolder, *, max_length: int) -> None:
    """Write a model as a Core ML program in fp16, with its config and tokenizer.

    Inputs are those of the tokenizer, int32 [1, tokens]; ``logits`` have the shape [1, classes].
    """
    with writing_export(text_model, own) as partial:
        with converting(text_model, "Core ML"):
            program = _convert(text_model, max_length=max_length)
        with silence():
            program.save(str(partial / MODEL_FILE))


def _convert(text_model: TextModel, *, max_length: int) -> Any:
    coremltools = import_extra("coreml")
    length = torch.export.Dim("length", min=MIN_LENGTH, max=max_length)
    graph = trace(text_model, (1, EXAMPLE_TOKENS), dynamic={1: length})
    aten = torch.ops.aten
    operators_that_coremltools_lacks = {
        aten.__and__.Tensor: torch.bitwise_and,
        aten.alias.default: torch.clone,
        aten.new_ones.default: _new_ones,
    }
    precision = coremltools.precision.FLOAT16
    if text_model.structure.mean_layer:
        # In fp16 the squares of what this layer multiplies would overflow.
        precision = coremltools.transform.FP16ComputePrecision(
            op_selector=lambda operation: operation.op_type != "layer_norm"
        )
    program = coremltools.convert(
        graph.run_decompositions(operators_that_coremltools_lacks),
        outputs=[coremltools.TensorType(name="logits", dtype=np.float32)],
        minimum_deployment_target=coremltools.target.macOS13,
        compute_precision=precision,
        skip_model_load=True,
    )
    description = program.get_spec()
    # torch.export names inputs after the argument that holds them.
    for name in text_model.tokenizer.model_input_names:
        coremltools.utils.rename_feature(description, f"inputs_{name}", name)
    # The conversion to float32 drops the shape.
    (logits,) = description.description.output
    logits.type.multiArrayType.shape[:] = [1, text_model.model.config.num_labels]
    named = coremltools.models.MLModel(
        description, weights_dir=program.weights_dir, skip_model_load=True
    )
    named.short_description = text_model.task.description("texts")
    named.user_defined_metadata["id2label"] = json.dumps(text_model.model.config.id2label)
    return named


def _new_ones(
    like: torch.Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return torch.full(size, 1, dtype=dtype or like.dtype)


def check_weights(file: Path, text_model: TextModel) -> list[str]:
    """Return the parameters that were folded into constants; FinetuneError if another is missing.

    All others are in the program, rounded to fp16.
    """
    coremltools = import_extra("coreml")
    with silence():
        program = coremltools.models.MLModel(str(file), skip_model_load=True)
        constants = coremltools.optimize.coreml.get_weights_metadata(program, weight_threshold=1)
    values = [one.val for one in constants.values() if one.val.dtype.kind == "f"]
    weights = {_bytes_of(one.astype(np.float16)) for one in values}
    folded = [
        name
        for name, one in text_model.model.named_parameters()
        if name not in text_model.structure.mean_layer
        and _bytes_of(one.detach().half().numpy()) not in weights
    ]
    if lost := [name for name in folded if not FOLDED.search(name)]:
        raise FinetuneError(
            f"{file} is not the run's model: it lacks {lost[0]}",
            remedy="use the run's model with transformers, and report this",
        )
    return folded


def _bytes_of(values: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of fp16 values; those too small for all their digits count as 0."""
    is_small = np.abs(values) < np.finfo(np.float16).tiny
    return np.where(is_small, np.float16(0), values).tobytes()
