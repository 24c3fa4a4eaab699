"""A model as a Core ML program, and what can be checked of it without a Mac."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.errors import FinetuneError, ModelUnsupported, UsageError
from finetune.export.folder import silence, writing_export
from finetune.model.load import TextModel
from finetune.tokenization.examples import prepare_mask

MODEL_FILE = "model.mlpackage"
# Any length but 1, which PyTorch takes for a constant.
SHORTEST = 2
EXAMPLE_TOKENS = 7
# What DeBERTa computes of its relative positions alone is the same for all texts.
FOLDED = re.compile(r"rel_embeddings|\bencoder\.LayerNorm|pos_(key_|query_|q_)?proj")
# torch.export names what is in an argument after that argument.
ARGUMENT = "inputs"


@dataclass(frozen=True)
class Program:
    """What coremltools reads of a program that it has written.

    Args:
        inputs: Their names: int32 of shape [1, tokens].
        shortest: Fewest tokens.
        longest: Most tokens.
        operations: That compute something.
        parameters: Tensors of the model that are in the program, rounded to fp16.
        folded: Names of those that only constants of the program depend on.
    """

    inputs: Sequence[str]
    shortest: int
    longest: int
    operations: int
    parameters: int
    folded: Sequence[str]


class _Logits(nn.Module):
    """Takes a model's inputs as int32 and a mask of 0 and 1, and returns its logits alone."""

    def __init__(self, text_model: TextModel) -> None:
        super().__init__()
        self.model: nn.Module = text_model.model
        self.takes_4d_mask = text_model.structure.takes_4d_mask

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        is_token = inputs["attention_mask"] != 0
        prepared = prepare_mask(
            {**inputs, "attention_mask": is_token}, takes_4d_mask=self.takes_4d_mask
        )
        logits: torch.Tensor = self.model(**prepared).logits
        return logits


def write_coreml(text_model: TextModel, folder: Path, *, max_length: int) -> None:
    """Write a model as a Core ML program in fp16, with its config and tokenizer.

    Inputs are those of the tokenizer, int32 of shape [1, tokens], the output ``logits`` has the
    shape [1, classes]. The names of the classes are in the metadata, as ``id2label``.

    Args:
        text_model: On the CPU; left in evaluation mode.
        folder: What an earlier export left there is replaced.
        max_length: Most tokens of a text.

    Raises:
        UsageError: If the folder holds something else.
        ModelUnsupported: If coremltools can't convert the model.
    """
    with writing_export(text_model, folder, name=MODEL_FILE) as partial:
        try:
            with silence():
                program = _convert(text_model, max_length=max_length)
        except Exception as error:  # coremltools raises whatever its converters meet
            kind = type(text_model.model).__name__
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelUnsupported(
                f"coremltools can't convert {kind} to Core ML: {reason}",
                remedy="use the run's model with transformers, or `finetune export onnx`",
            ) from error
        with silence():
            program.save(str(partial / MODEL_FILE))


def import_converter() -> Any:
    """Return the module ``coremltools``.

    Raises:
        UsageError: If the package of the extra ``coreml`` is missing.
    """
    try:
        with silence():
            import coremltools
    except ImportError as error:
        raise UsageError(
            f"export to Core ML needs the package {error.name}",
            remedy="pip install 'finetune-mps[coreml]'",
        ) from error
    return coremltools


def read_program(file: Path, text_model: TextModel) -> Program:
    """Return what coremltools reads of a program, and make sure that it holds the model's weights.

    Raises:
        FinetuneError: If a weight is not there, or the inputs are others.
    """
    coremltools = import_converter()
    with silence():
        model = coremltools.models.MLModel(str(file), skip_model_load=True)
        constants = coremltools.optimize.coreml.get_weights_metadata(model, weight_threshold=1)
    description = model.get_spec()
    inputs = {one.name: one.type.multiArrayType for one in description.description.input}
    if sorted(inputs) != sorted(text_model.tokenizer.model_input_names):
        raise _differs(file, f"its inputs are {', '.join(inputs)}")
    parameters = dict(text_model.model.named_parameters())
    absent = _absent(parameters, [one.val for one in constants.values()])
    if lost := [name for name in absent if not FOLDED.search(name)]:
        raise _differs(file, f"it lacks {lost[0]}")
    lengths = inputs["input_ids"].shapeRange.sizeRanges[1]
    (block,) = description.mlProgram.functions["main"].block_specializations.values()
    return Program(
        inputs=list(inputs),
        shortest=lengths.lowerBound,
        longest=lengths.upperBound,
        operations=sum(one.type != "const" for one in block.operations),
        parameters=len(parameters) - len(absent),
        folded=absent,
    )


def _convert(text_model: TextModel, *, max_length: int) -> Any:
    coremltools = import_converter()
    model: nn.Module = text_model.model
    model.eval()
    names = text_model.tokenizer.model_input_names
    example = {name: torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long) for name in names}
    example["input_ids"] += text_model.tokenizer.sep_token_id or 1
    example["attention_mask"] += 1
    length = torch.export.Dim("length", min=SHORTEST, max=max_length)
    exported = torch.export.export(
        _Logits(text_model), (example,), dynamic_shapes=({name: {1: length} for name in names},)
    )
    program = coremltools.convert(
        exported.run_decompositions(_operators_in_others()),
        outputs=[coremltools.TensorType(name="logits", dtype=np.float32)],
        minimum_deployment_target=coremltools.target.macOS13,
        skip_model_load=True,
    )
    description = program.get_spec()
    for name in names:
        coremltools.utils.rename_feature(description, f"{ARGUMENT}_{name}", name)
    # Converted to float32, it has lost its shape.
    (logits,) = description.description.output
    logits.type.multiArrayType.shape[:] = [1, text_model.model.config.num_labels]
    named = coremltools.models.MLModel(
        description, weights_dir=program.weights_dir, skip_model_load=True
    )
    named.short_description = text_model.task.description("texts")
    named.user_defined_metadata["id2label"] = json.dumps(text_model.model.config.id2label)
    return named


def _operators_in_others() -> dict[Any, Callable[..., torch.Tensor]]:
    """Return operators that coremltools lacks, as functions of those that it has."""
    aten = torch.ops.aten

    def new_ones(
        like: torch.Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
    ) -> torch.Tensor:
        return torch.full(size, 1, dtype=dtype or like.dtype)

    return {
        aten.__and__.Tensor: torch.bitwise_and,
        aten.alias.default: torch.clone,
        aten.new_ones.default: new_ones,
    }


def _absent(
    parameters: Mapping[str, nn.Parameter], constants: Sequence[np.ndarray[Any, Any]]
) -> list[str]:
    """Return the names of the parameters that, rounded to fp16, are no constant of the program."""
    known = {_bytes_of(one) for one in constants if one.dtype == np.float16}
    rounded = {name: one.detach().half().numpy() for name, one in parameters.items()}
    return [name for name, one in rounded.items() if _bytes_of(one) not in known]


def _bytes_of(values: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of fp16 values; those too small for all their digits count as 0."""
    is_small = np.abs(values) < np.finfo(np.float16).tiny
    return np.where(is_small, np.float16(0), values).tobytes()


def _differs(file: Path, how: str) -> FinetuneError:
    return FinetuneError(
        f"{file} is not the run's model: {how}",
        remedy="use the run's model with transformers, and report this",
    )
