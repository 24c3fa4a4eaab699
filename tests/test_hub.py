"""The Hub client, with a local server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import MAIN_COMMIT, HubServer, hub_client

from finetune.errors import (
    DataNotFoundError,
    HubNotReachableError,
    ModelNotFoundError,
    ModelUnsupportedError,
    UsageError,
)
from finetune.hub import ask_hub, fetch_model, resolve

MODEL = "acme/tiny"
ROWS = "default/train/0000.parquet"
DATASET = "acme/rows"
NEEDED = {"config.json", "vocab.txt", "tokenizer.json", "model.safetensors"}


def write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"content of {name}".encode() * 1000)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    unneeded = ["README.md", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"]
    write_files(folder, [*NEEDED, *unneeded, "model.fp16.safetensors"])
    return folder


@pytest.fixture
def hub(tmp_path: Path, model_folder: Path) -> Iterator[HubServer]:
    write_files(tmp_path / "dataset", ["default/train/0000.parquet"])
    with (
        HubServer({MODEL: model_folder}, {DATASET: tmp_path / "dataset"}) as server,
        hub_client(endpoint=server.endpoint, home=tmp_path / "home"),
    ):
        yield server


@pytest.mark.parametrize("error", ["RuntimeError('lost')", "ValueError('no JSON')"])
def test_hub_client_error_reports_an_interrupted_download(
    error: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = {"__name__": "huggingface_hub.file_download"}
    exec(f"def fail(*_, **__): raise {error}", client)
    monkeypatch.setattr("finetune.hub.snapshot_download", client["fail"])
    with pytest.raises(HubNotReachableError, match="was interrupted"):
        fetch_model(MODEL, revision=None)


def cached_files(tmp_path: Path) -> set[str]:
    """Return the names of the complete files in the cache."""
    return {path.name for path in tmp_path.glob("home/hub/*/snapshots/*/**/*") if path.is_file()}


def unfinished_files(tmp_path: Path) -> list[Path]:
    """Return partial downloads and broken links, which a cache must not contain."""
    paths = (tmp_path / "home").rglob("*")
    return [path for path in paths if path.suffix == ".incomplete" or not path.exists()]


def test_model_download_contains_only_needed_files(
    hub: HubServer, tmp_path: Path, model_folder: Path
) -> None:
    folder = fetch_model(MODEL, revision=None)
    assert folder.name == MAIN_COMMIT
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert sorted(hub.downloads()) == sorted(NEEDED)
    for name in NEEDED:
        assert (folder / name).read_bytes() == (model_folder / name).read_bytes()


def test_sharded_model_is_downloaded_with_all_shards_of_its_index(
    hub: HubServer, model_folder: Path
) -> None:
    (model_folder / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_files(model_folder, shards)
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = fetch_model(MODEL, revision=None)
    assert {path.name for path in folder.glob("*.safetensors")} == set(shards)


@pytest.mark.parametrize("revision", [None, "main", MAIN_COMMIT])
def test_model_is_loaded_from_the_cache_without_a_network(
    hub: HubServer, tmp_path: Path, revision: str | None
) -> None:
    folder = fetch_model(MODEL, revision=revision)
    with hub_client(endpoint="http://127.0.0.1:9", home=tmp_path / "home"):
        assert fetch_model(MODEL, revision=revision) == folder


def test_read_only_cache_provides_its_files(hub: HubServer, tmp_path: Path) -> None:
    folder = fetch_model(MODEL, revision=None)
    cache = tmp_path / "home/hub"
    # A file in place of a folder can't be written to, even by root.
    for unwritable in (folder.parents[1] / "refs", cache / ".locks"):
        shutil.rmtree(unwritable)
        unwritable.touch()
    hub.requests.clear()
    assert fetch_model(MODEL, revision=None) == folder
    assert hub.downloads() == []

    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=str(cache)) as raised:
        fetch_model(MODEL, revision=None)
    assert "HF_HOME" in raised.value.remedy
    assert "HF_HUB_OFFLINE=1" in raised.value.remedy


def test_unreachable_hub_is_reported_with_the_reason(hub: HubServer) -> None:
    hub.failures.delay_seconds = 300.0
    with pytest.raises(HubNotReachableError, match="timed out") as caught:
        ask_hub("model", MODEL, timeout_seconds=0.3)
    assert hub.endpoint in caught.value.message


def test_interrupted_download_leaves_no_partial_files_and_resumes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.failures.cut_after_bytes["model.safetensors"] = 100
    with pytest.raises(HubNotReachableError, match="was interrupted"):
        fetch_model(MODEL, revision=None)
    assert cached_files(tmp_path) == NEEDED - {"model.safetensors"}
    assert unfinished_files(tmp_path) == []

    hub.failures.cut_after_bytes.clear()
    hub.requests.clear()
    fetch_model(MODEL, revision=None)
    assert hub.downloads() == ["model.safetensors"]


def test_gated_model_error_mentions_its_page_and_the_token(hub: HubServer) -> None:
    hub.failures.gated.add(MODEL)
    with pytest.raises(ModelNotFoundError) as raised:
        fetch_model(MODEL, revision=None)
    assert f"{hub.endpoint}/{MODEL}" in raised.value.remedy
    assert "HF_TOKEN" in raised.value.remedy


@pytest.mark.parametrize("name", ["acme/tinny", "no/such/folder", "two words", "./model"])
def test_unknown_model_error_suggests_to_check_the_spelling(hub: HubServer, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=name) as raised:
        fetch_model(name, revision=None)
    assert "spelling" in raised.value.remedy


def test_pickled_weights_are_rejected_before_the_download(
    hub: HubServer, model_folder: Path
) -> None:
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupportedError, match="safetensors") as raised:
        fetch_model(MODEL, revision=None)
    assert "--revision refs/pr/" in raised.value.remedy
    assert hub.downloads() == []


def test_cached_tokenizer_is_not_used_as_a_model(hub: HubServer, tmp_path: Path) -> None:
    folder = fetch_model(MODEL, revision=None, with_weights=False)
    with hub_client(endpoint=hub.endpoint, home=tmp_path / "home", offline=True):
        assert fetch_model(MODEL, revision=None, with_weights=False) == folder
        with pytest.raises(HubNotReachableError, match="not in the cache"):
            fetch_model(MODEL, revision=None)
    assert fetch_model(MODEL, revision=None) == folder


def test_dataset_files_are_listed_online_and_from_the_cache_offline(
    hub: HubServer, tmp_path: Path
) -> None:
    write_files(tmp_path / "dataset", ["README.md"])
    online = resolve("dataset", DATASET, revision=None)
    assert (online.commit, online.files) == (MAIN_COMMIT, {ROWS, "README.md"})
    with (
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home", offline=True),
        pytest.raises(HubNotReachableError, match=DATASET),
    ):
        resolve("dataset", DATASET, revision=None)
    online.fetch([ROWS])
    with hub_client(endpoint=hub.endpoint, home=tmp_path / "home", offline=True):
        offline = resolve("dataset", DATASET, revision=None)
        assert (offline.commit, offline.files) == (MAIN_COMMIT, {ROWS})
        with pytest.raises(HubNotReachableError, match="HF_HUB_OFFLINE"):
            offline.fetch(["README.md"])
    with pytest.raises(DataNotFoundError, match="acme/raws"):
        resolve("dataset", "acme/raws", revision=None)
