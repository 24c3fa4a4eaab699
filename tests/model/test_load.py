import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, SIZES, save_tiny_model, tiny_config, tiny_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    ConvBertConfig,
    FNetConfig,
    PreTrainedModel,
)
from transformers.models.bert.modeling_bert import BertSelfAttention

from finetune import events
from finetune.errors import ModelUnsupportedError
from finetune.events import sent_to
from finetune.model import source as source_module
from finetune.model.load import TextModel, load_model, load_shape
from finetune.tasks.single import Single

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]


def load(
    source: Path | str,
    *,
    seed: int = 0,
    class_names: Sequence[str] = NAMES,
    from_scratch: bool = False,
    pooling: Any = "auto",
    emitted: list[events.Event] | None = None,
) -> TextModel:
    torch.manual_seed(seed)
    with sent_to(([] if emitted is None else emitted).append):
        return load_model(
            str(source),
            revision=None,
            task=Single(class_names),
            from_scratch=from_scratch,
            pooling=pooling,
        )


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def weight_of(model: PreTrainedModel) -> torch.Tensor:
    return model.get_parameter("classifier.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_head_for_different_classes_is_reinitialized(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    trained = tiny_model(classes=len(NAMES))
    trained.config.id2label = dict(enumerate(["good", "bad", "so-so", "none"]))
    torch.nn.init.ones_(trained.get_parameter("classifier.weight"))
    torch.nn.init.ones_(trained.get_parameter("classifier.bias"))
    trained.save_pretrained(folder)

    text_model = load(folder, seed=1)

    assert weight_of(text_model.model).std().item() == pytest.approx(0.02, rel=0.3)
    assert not text_model.model.get_parameter("classifier.bias").any()


@pytest.mark.parametrize("model_type", ["novel", "bert"])
def test_custom_model_code_is_not_executed(folder: Path, model_type: str) -> None:
    mark = folder / "code-was-run"
    (folder / "custom.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: ...\n")
    auto_map = {
        name: "custom.Model"
        for name in ("AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer")
    }
    change_config(folder, model_type=model_type, auto_map=auto_map)

    try:
        text_model = load(folder)
    except ModelUnsupportedError:
        assert model_type == "novel"
    else:
        assert type(text_model.model) is type(tiny_model())
    assert not mark.exists()


def test_token_ids_outside_the_embeddings_are_rejected_before_training(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] = torch.ones(90, SIZES["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, vocab_size=90)
    text_model = load(folder)
    known, unknown = text_model.tokenizer.convert_ids_to_tokens([89, 90])

    assert text_model.encode([known], max_length=9).columns["input_ids"].max() == 89
    with pytest.raises(ModelUnsupportedError, match=r"token ID 90, .* up to 89"):
        text_model.inputs(text_model.encode(["the", unknown], max_length=9))


def remove_tokenizer(folder: Path, **config: str) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def remove_padding(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))


def keep_only_sentencepiece(folder: Path, name: str) -> None:
    remove_tokenizer(folder)
    (folder / name).write_bytes(b"pieces")


UNREADABLE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no files": (remove_tokenizer, "no fast tokenizer", "save_pretrained"),
    "no padding": (remove_padding, "without a padding token", "pad_token in tokenizer_config"),
    "slow": (
        lambda folder: remove_tokenizer(folder, tokenizer_class="CanineTokenizer"),
        "no fast tokenizer",
        "tokenizer.json",
    ),
    "DeBERTa-v3": (
        lambda folder: keep_only_sentencepiece(folder, "spm.model"),
        "reading spm.model of .* needs sentencepiece",
        "pip install sentencepiece",
    ),
}


@pytest.mark.parametrize(("damage", "words", "remedy"), UNREADABLE.values(), ids=UNREADABLE)
def test_unusable_tokenizer_is_rejected_with_the_cause(
    damage: Callable[[Path], None], words: str, remedy: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    damage(folder)
    monkeypatch.setattr(source_module, "find_spec", lambda name: None)
    capfd.readouterr()
    with pytest.raises(ModelUnsupportedError, match=words) as raised:
        load(folder)
    assert remedy in raised.value.remedy
    assert capfd.readouterr().err == ""


Weights = dict[str, torch.Tensor]


def without_query_biases(weights: Weights) -> Weights:
    return {name: one for name, one in weights.items() if "query.bias" not in name}


UNFIT: dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], str]] = {
    "fewer words": (lambda weights: weights, {"vocab_size": 310}, "has shape .300, 32. instead"),
    "a parameter of each layer": (without_query_biases, {}, "query.bias is missing"),
    "fewer layers": (lambda weights: weights, {"num_hidden_layers": 4}, "layer.3.* is missing"),
    "other layers": (lambda weights: weights, tiny_config("modernbert").to_dict(), "do not match"),
    "more layers": (
        lambda weights: weights,
        {"num_hidden_layers": 2},
        "describes no layer for .*layer.2",
    ),
}


@pytest.mark.parametrize(("change", "config", "words"), UNFIT.values(), ids=UNFIT)
def test_weights_that_do_not_match_the_config_are_rejected(
    change: Callable[[Weights], Weights], config: dict[str, Any], words: str, folder: Path
) -> None:  # fmt: skip
    weights = change(load_file(folder / "model.safetensors"))
    weights = {name: one.contiguous() for name, one in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, **config)
    with pytest.raises(ModelUnsupportedError, match=words) as raised:
        load(folder)
    assert "the same model, or add --from-scratch" in raised.value.remedy
    emitted: list[events.Event] = []
    load(folder, from_scratch=True, emitted=emitted)
    # Missing layers need no random values.
    assert len(emitted) == ("no layer" not in words)


class MixesAllTokens(nn.Module):
    """Attention without a mask."""

    def forward(self, features: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return features + features.mean(1, keepdim=True), None


@pytest.mark.parametrize("kind", ["fnet", "convbert", "pads left", "no mask"])
def test_model_whose_logits_depend_on_padding_is_rejected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path)
    if kind == "fnet":
        AutoModel.from_config(FNetConfig(**SIZES)).save_pretrained(folder)
    elif kind == "convbert":
        sizes = SIZES | {"hidden_size": 256, "num_hidden_layers": 8}
        AutoModel.from_config(ConvBertConfig(**sizes, embedding_size=256)).save_pretrained(folder)
    elif kind == "pads left":
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
    else:
        monkeypatch.setattr(BertSelfAttention, "forward", MixesAllTokens.forward)
    with pytest.raises(ModelUnsupportedError, match="with padding on the"):
        load(folder)


def test_longest_text_has_a_position_for_each_token(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        text_model = load(save_tiny_model(tmp_path / architecture, architecture))
        # RoBERTa positions start after the padding token ID, which is 0 here.
        assert text_model.max_tokens == (63 if architecture == "roberta" else 64)

        text_model.tokenizer.model_max_length = 10**30
        tokens = torch.full((1, text_model.max_tokens), 7)
        text_model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


# Numbers from model cards and papers, for two classes.
PARAMETERS = {"bert-base-uncased": 109_483_778, "bert-large-uncased": 335_143_938}


@pytest.mark.parametrize("name", PARAMETERS)
def test_bundled_configs_work_offline_and_have_the_published_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(load_shape(name, revision=None))
    assert model.num_parameters() == PARAMETERS[name]
