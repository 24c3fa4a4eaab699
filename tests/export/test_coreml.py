"""The Core ML programs that an export writes, for each architecture."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, save_tiny_model

from finetune.config.schema import Pooling
from finetune.errors import FinetuneError, ModelUnsupported
from finetune.events import ignore
from finetune.export.coreml import MODEL_FILE, check_weights, write_coreml
from finetune.model.load import TextModel, load_model
from finetune.ownership import OwnFolder
from finetune.tasks.single import Single

if TYPE_CHECKING:
    from tiny_runs import Command

pytestmark = pytest.mark.skipif(find_spec("coremltools") is None, reason="needs the extra coreml")

FOLDED = {"deberta-v2": ["deberta.encoder.rel_embeddings.weight"]}


def load(folder: Path, pooling: Pooling = "auto") -> TextModel:
    task = Single(["a", "b", "c"])
    return load_model(
        str(folder), revision=None, task=task, from_scratch=False, pooling=pooling, emit=ignore
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "pooling"), [("bert", "mean"), *((one, "auto") for one in ARCHITECTURES)]
)
def test_a_program_takes_texts_of_any_length_and_has_the_models_weights(
    tmp_path: Path, architecture: str, pooling: Pooling
) -> None:
    import coremltools

    text_model = load(save_tiny_model(tmp_path / "tiny", architecture), pooling)
    write_coreml(text_model, OwnFolder(tmp_path / "coreml", "coreml"), max_length=48)
    file = tmp_path / "coreml" / MODEL_FILE
    assert check_weights(file, text_model) == FOLDED.get(architecture, [])
    spec = coremltools.utils.load_spec(str(file))
    inputs = {one.name: one.type.multiArrayType for one in spec.description.input}
    assert sorted(inputs) == ["attention_mask", "input_ids"]
    lengths = inputs["input_ids"].shapeRange.sizeRanges[1]
    assert (lengths.lowerBound, lengths.upperBound) == (2, 48)
    (logits,) = spec.description.output
    assert (logits.name, list(logits.type.multiArrayType.shape)) == ("logits", [1, 3])
    labels = json.loads(spec.description.metadata.userDefined["id2label"])
    assert list(labels.values()) == ["a", "b", "c"]
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    kinds = [one.type for one in block.operations]
    assert kinds.count("softmax") == 3  # one for each pretrained layer
    assert (tmp_path / "coreml" / "tokenizer.json").is_file()

    with torch.no_grad():
        next(iter(text_model.model.parameters()))[7, 7] += 0.01
    with pytest.raises(FinetuneError, match=r"it lacks .*embeddings.*weight"):
        check_weights(file, text_model)


def test_a_model_that_can_not_be_converted_is_refused_with_the_reason(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_model = load(tiny_folder)

    def refuse(*inputs: torch.Tensor, **named: torch.Tensor) -> None:
        raise NotImplementedError("Unsupported fx node fft\nand more")

    monkeypatch.setattr(text_model.model, "forward", refuse)
    monkeypatch.setattr("finetune.export.coreml.import_extra", lambda _: None)
    with pytest.raises(ModelUnsupported, match=r"BertForSeq.*: Unsupported fx node fft\n"):
        write_coreml(text_model, OwnFolder(tmp_path / "coreml", "coreml"), max_length=48)
    assert not (tmp_path / "coreml").exists()


def test_a_disk_that_is_full_is_no_fault_of_the_model(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: str) -> None:
        raise OSError(28, "No space left on device", path)

    program = SimpleNamespace(save=save)
    monkeypatch.setattr("finetune.export.coreml._convert", lambda *_, **__: program)
    with pytest.raises(OSError, match="No space left"):
        write_coreml(load(tiny_folder), OwnFolder(tmp_path / "coreml", "coreml"), max_length=48)


@pytest.mark.slow
def test_the_command_says_what_was_checked_and_what_not(
    command: "Command", finished_run: Path, tmp_path: Path
) -> None:
    done = command("export", "coreml", finished_run, "--output-dir", tmp_path / "exported")
    assert done.code == 0, done.errors
    assert "57 parameters of the model are in it" in done.output
    assert "not checked: its predictions" in done.output


@pytest.mark.mps
def test_a_mac_gives_the_logits_of_pytorch(tmp_path: Path, tiny_folder: Path) -> None:
    import coremltools

    text_model = load(tiny_folder)
    write_coreml(text_model, OwnFolder(tmp_path / "coreml", "coreml"), max_length=48)
    program = coremltools.models.MLModel(str(tmp_path / "coreml" / MODEL_FILE))
    for text in ("Who wrote Faust?", "by", "How old is the river Nile? " * 4):
        inputs = text_model.tokenizer(text, truncation=True, max_length=48, return_tensors="pt")
        with torch.inference_mode():
            expected = text_model.model(**inputs).logits.numpy()
        found = program.predict(
            {name: one.numpy().astype(np.int32) for name, one in inputs.items()}
        )
        np.testing.assert_allclose(found["logits"], expected, atol=0.01)
