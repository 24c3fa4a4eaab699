import json
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    ARCHITECTURES,
    SIZES,
    save_tiny_model,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoModel, PreTrainedModel, Qwen2Config
from transformers.utils import logging

from finetune import events
from finetune.errors import ModelUnsupported
from finetune.model.load import TextModel, load_model, save_model
from finetune.tasks.single import Single

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]


def load(
    source: Path | str,
    *,
    seed: int = 0,
    class_names: Sequence[str] = NAMES,
    from_scratch: bool = False,
    emitted: list[events.Event] | None = None,
) -> TextModel:
    torch.manual_seed(seed)
    return load_model(
        str(source),
        revision=None,
        task=Single(class_names),
        from_scratch=from_scratch,
        emit=([] if emitted is None else emitted).append,
    )


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def weight_of(model: PreTrainedModel) -> torch.Tensor:
    return model.get_parameter("classifier.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoder_is_that_of_the_folder(tmp_path: Path, architecture: str) -> None:
    emitted: list[events.Event] = []

    text_model = load(save_tiny_model(tmp_path, architecture), emitted=emitted)

    saved = tiny_model(architecture).base_model.state_dict()
    loaded = text_model.model.base_model.state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
    assert emitted == []


def test_new_head_depends_on_the_seed_alone(folder: Path) -> None:
    first, same, other = (weight_of(load(folder, seed=seed).model) for seed in (1, 1, 2))

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_head_of_other_classes_is_not_taken_over(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    trained = tiny_model(classes=len(NAMES))
    trained.config.id2label = dict(enumerate(["good", "bad", "so-so", "none"]))
    torch.nn.init.ones_(trained.get_parameter("classifier.weight"))
    torch.nn.init.ones_(trained.get_parameter("classifier.bias"))
    trained.save_pretrained(folder)

    text_model = load(folder, seed=1)

    assert weight_of(text_model.model).std().item() == pytest.approx(0.02, rel=0.3)
    assert not text_model.model.get_parameter("classifier.bias").any()


def test_head_of_the_same_classes_comes_back_however_many(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(12)]
    folder = save_tiny_model(tmp_path)
    trained = tiny_model(classes=len(names))
    trained.config.id2label = dict(enumerate(names))
    trained.save_pretrained(folder)

    again = load(folder, class_names=names)

    assert torch.equal(weight_of(again.model), weight_of(trained))


def test_weights_saved_in_half_precision_train_in_fp32(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    half = tiny_model().bfloat16()
    half.base_model.save_pretrained(folder)

    text_model = load(folder)

    assert {parameter.dtype for parameter in text_model.model.parameters()} == {torch.float32}


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(tiny_model().base_model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelUnsupported, match="no weights in safetensors"):
        load(folder)


@pytest.mark.parametrize("model_type", ["novel", "bert"])
def test_code_that_comes_with_a_model_is_not_run(folder: Path, model_type: str) -> None:
    mark = folder / "code-was-run"
    (folder / "custom.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: ...\n")
    auto_map = {
        name: "custom.Model"
        for name in ("AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer")
    }
    change_config(folder, model_type=model_type, auto_map=auto_map)

    try:
        text_model = load(folder)
    except ModelUnsupported:
        assert model_type == "novel"
    else:
        assert type(text_model.model) is type(tiny_model())
    assert not mark.exists()


HOSTILE_CONFIGS: dict[str, dict[str, Any] | bytes] = {
    "of an unknown kind": {"model_type": "novel"},
    "with no layers": {"num_hidden_layers": 0},
    "of no number": {"hidden_size": "wide"},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "cut off": b"{",
}


@pytest.mark.parametrize("config", HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_a_config_that_no_text_classifier_can_be_built_from_is_refused(
    folder: Path, config: dict[str, Any] | bytes
) -> None:
    if isinstance(config, bytes):
        (folder / "config.json").write_bytes(config)
    else:
        change_config(folder, **config)

    with pytest.raises(ModelUnsupported) as refused:
        load(folder)

    assert refused.value.exit_code == 2
    assert str(folder) in refused.value.message or "no encoder of layers" in refused.value.message
    assert "\n" not in refused.value.message + refused.value.remedy


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"model_max_length": 2, "pad_token": "[PAD]"}'),
        ("model.safetensors", b"not what it says"),
    ],
)
def test_damaged_files_are_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(ModelUnsupported) as refused:
        load(folder)

    assert str(folder) in refused.value.message
    assert "\n" not in refused.value.message + refused.value.remedy


def test_token_ids_that_the_model_lacks_are_refused_before_the_first_step(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] = torch.ones(90, SIZES["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, vocab_size=90)
    text_model = load(folder)
    known, unknown = text_model.tokenizer.convert_ids_to_tokens([89, 90])

    assert text_model.encode([known], max_length=9).columns["input_ids"].max() == 89
    with pytest.raises(ModelUnsupported, match=r"token id 90, .* up to 89"):
        text_model.inputs(text_model.encode(["the", unknown], max_length=9))


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"][3] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelUnsupported, match=r"NaN or infinite, in bert\.encoder\.layer\.1"):
        load(folder)


def test_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()

    # For most architectures transformers makes one up that knows no word.
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        load(folder)


def test_tokenizer_without_padding_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"pad_token": None}))

    with pytest.raises(ModelUnsupported, match="padding token"):
        load(folder)


def test_missing_parameters_of_the_encoder_are_reported_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not name.startswith("encoder.layer.1.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    emitted: list[events.Event] = []

    load(folder, emitted=emitted)

    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert warning.message.startswith(f"{len(weights) - len(kept)} parameters of the encoder")
    assert "bert.encoder.layer.1." in warning.message


@pytest.mark.parametrize("architecture", ["modernbert", "distilbert"])
def test_weights_of_another_model_are_refused_unless_training_is_from_scratch(
    architecture: str, folder: Path
) -> None:
    config = tiny_config(architecture)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))

    with pytest.raises(ModelUnsupported, match="are not in the weights") as refused:
        load(folder)

    assert "--from-scratch" in refused.value.remedy
    emitted: list[events.Event] = []
    text_model = load(folder, from_scratch=True, emitted=emitted)
    assert text_model.model.config.model_type == config.model_type
    assert len(emitted) == 1


def test_a_model_without_weights_is_trained_from_scratch_when_asked(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    first, same, other = (load(folder, from_scratch=True, seed=seed) for seed in (1, 1, 2))

    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(first.model.get_parameter(name), same.model.get_parameter(name))
    assert not torch.equal(first.model.get_parameter(name), other.model.get_parameter(name))


def test_a_pooler_that_the_weights_lack_is_new_and_not_reported(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    emitted: list[events.Event] = []

    new = load(folder, emitted=emitted).structure.new

    assert new >= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert emitted == []


def test_a_config_without_a_padding_id_takes_the_tokenizers(tmp_path: Path) -> None:
    config = Qwen2Config(
        **SIZES | {"pad_token_id": None}, num_key_value_heads=2, bos_token_id=2, eos_token_id=3
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    text_model = load(tmp_path)

    inputs = text_model.inputs(text_model.encode(["who wrote the word", "who"], max_length=9))
    alone, wide, both = (
        text_model.model.eval()(**inputs.inputs_of(np.array(rows), length)).logits
        for rows, length in (([1], 5), ([1], 9), ([0, 1], 9))
    )
    torch.testing.assert_close(alone, wide)
    torch.testing.assert_close(both[1:], wide)


def test_longest_text_has_a_position_for_every_token(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        text_model = load(save_tiny_model(tmp_path / architecture, architecture))
        # RoBERTa's positions begin behind the padding token's id, here 0.
        assert text_model.max_tokens == (63 if architecture == "roberta" else 64)

        text_model.tokenizer.model_max_length = 10**30
        tokens = torch.full((1, text_model.max_tokens), 7)
        text_model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


@pytest.fixture
def text_model(tmp_path: Path) -> TextModel:
    return load(save_tiny_model(tmp_path / "pretrained"))


def test_a_saved_model_comes_back_bit_for_bit(text_model: TextModel, tmp_path: Path) -> None:
    save_model(text_model, tmp_path / "model")

    again = load(tmp_path / "model")

    for name, tensor in text_model.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert again.tokenizer.get_vocab() == text_model.tokenizer.get_vocab()
    assert again.structure == replace(text_model.structure, new=frozenset())
    assert list(again.task.class_names) == NAMES


def test_saving_and_loading_show_no_bar_and_no_report_and_leave_those_of_others(
    text_model: TextModel, tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity_warning()
    for set_progress_bars in (logging.enable_progress_bar, logging.disable_progress_bar):
        set_progress_bars()
        enabled = logging.is_progress_bar_enabled()
        save_model(text_model, tmp_path / "model")
        load(tiny_folder)
        assert logging.is_progress_bar_enabled() == enabled
        assert logging.get_verbosity() == WARNING
    (logging.enable_progress_bar if was_enabled else logging.disable_progress_bar)()
    logging.set_verbosity(level)

    assert capfd.readouterr().err == ""


def test_files_have_the_permissions_that_the_user_gives_to_files(
    text_model: TextModel, tmp_path: Path
) -> None:
    before = os.umask(0o007)
    try:
        save_model(text_model, tmp_path / "model")
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()}
    assert modes == {0o660}
