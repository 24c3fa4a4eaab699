"""A run that downloads its model and data from a local Hub server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from data.test_hub import write_trec
from hub_server import HubServer, hub_client
from tiny_models import save_tiny_model
from tiny_runs import unfinished_files

import finetune
from finetune.data.trec import COARSE, FINE, HUB_REPOSITORY
from finetune.files import read_json

MODEL = "someone/tiny"


def made_up_rows(times: int) -> list[tuple[str, str]]:
    return [(fine, f"Question {number} of {fine} ?") for fine in FINE for number in range(times)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def hub(tmp_path: Path, model_folder: Path) -> Iterator[HubServer]:
    """A Hub with a small model and questions in TREC format."""
    write_trec(tmp_path / "trec/default/train/0000.parquet", made_up_rows(4))
    write_trec(tmp_path / "trec/default/test/0000.parquet", made_up_rows(1))
    with HubServer({MODEL: model_folder}, {HUB_REPOSITORY: tmp_path / "trec"}) as server:
        yield server


def test_run_downloads_model_and_data_once_and_repeats_offline(
    hub: HubServer, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    options: dict[str, Any] = {
        "model": MODEL, "freeze_core": True, "device": "cpu", "max_steps": 2,
        "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.1,
    }  # fmt: skip
    with hub_client(endpoint=hub.endpoint, home=home):
        online = finetune.run(**options, output_dir=str(tmp_path / "online"))
    results = online.to_json()
    assert (results["data"], results["model"], results["mode"]) == ("trec", MODEL, "head")
    assert (results["train_samples"], results["eval_samples"]) == (180, 20)
    assert results["test_samples"] == 50
    assert results["class_names"] == list(COARSE)
    downloads = hub.downloads()
    assert downloads.count("0000.parquet") == 2
    assert downloads.count("model.safetensors") == 1
    assert unfinished_files(home) == []

    manifest = read_json(tmp_path / "online" / "manifest.json")
    saved = yaml.safe_load((tmp_path / "online" / "config.yaml").read_text())
    assert saved["model"]["revision"] in manifest["model"].values()  # the commit
    assert re.fullmatch("[0-9a-f]{40}", saved["model"]["revision"])
    assert any(re.fullmatch("[0-9a-f]{40}", one) for one in manifest["sources"].values())

    hub.requests.clear()
    with hub_client(endpoint=hub.endpoint, home=home, offline=True):
        offline = finetune.run(**options, output_dir=str(tmp_path / "offline"))
    assert hub.requests == []
    assert offline.test == online.test
    config = (tmp_path / "online" / "config.yaml").read_bytes()
    assert config == (tmp_path / "offline" / "config.yaml").read_bytes()
