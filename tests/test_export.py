"""The files of an export, for each architecture."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model

from finetune.config.schema import Pooling
from finetune.export import MODEL_FILE, OnnxModel, write_onnx
from finetune.model.load import TextModel, load_model
from finetune.ownership import OwnFolder
from finetune.tasks.single import Single
from finetune.tokenization.examples import inputs_of_texts

pytest.importorskip("onnxruntime", reason="needs the extra onnx")

TEXTS = ["Who wrote Faust?", "How old is the river Nile?", "by", "What does NASA stand for?" * 3]


def load(folder: Path, pooling: Pooling) -> TextModel:
    task = Single(["a", "b", "c"])
    return load_model(str(folder), revision=None, task=task, from_scratch=False, pooling=pooling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [("distilbert", "mean"), ("deberta-v2", "auto"), ("modernbert", "auto"), ("eurobert", "auto")],
)
def test_onnxruntime_gives_the_logits_of_pytorch_at_any_batch_size_and_length(
    tmp_path: Path, architecture: str, pooling: Pooling
) -> None:
    text_model = load(save_tiny_model(tmp_path / "tiny", architecture), pooling)
    write_onnx(text_model, OwnFolder(tmp_path / "onnx", "onnx"), quantizes=False)
    exported = OnnxModel(tmp_path / "onnx" / MODEL_FILE)
    encoded = text_model.encode(TEXTS, max_length=64)
    examples = inputs_of_texts(encoded, takes_4d_mask=False)
    for indices in ([0], [2], [1, 0], [0, 1, 2, 3]):
        inputs = examples.inputs_of(np.array(indices), int(encoded.lengths[indices].max()))
        with torch.inference_mode():
            expected = text_model.model(**inputs).logits
        torch.testing.assert_close(exported(**inputs).logits, expected, atol=1e-5, rtol=1e-4)
