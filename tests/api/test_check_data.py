"""A look at the data of a run, through the model's tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, hub_client

from finetune.api.check_data import check_data
from finetune.config.schema import Config, DataConfig, ModelConfig
from finetune.events import Event, WarningMessage

ROWS = [("a river", "x"), ("a city of the old river", "y"), ("A  River", "x"), ("who", "y")] * 5


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{text} {number // 4},{label}" for number, (text, label) in enumerate(ROWS)]
    path.write_text("\n".join(["text,label", *lines, ",x"]))
    return path


def check(
    data: Path, model: str | Path, *, emitted: list[Event] | None = None, **options: Any
) -> dict[str, Any]:
    config = Config(
        data=DataConfig(data=str(data), **options),
        model=ModelConfig(model=str(model), max_length=8),
    )
    return check_data(config, emit=([] if emitted is None else emitted).append).to_json()


def test_findings_lengths_and_suggestions_come_together(table: Path, tiny_folder: Path) -> None:
    found = check(table, tiny_folder, test_fraction=0.2, validation_fraction=0.1)
    assert found["schema_version"] == 1
    assert found["rows"] == {"train": 20}
    assert found["rows_of_a_run"] == {"train": 15, "validation": 1, "test": 4}
    assert found["repeats"]["train"]["rows_up_to_case"] == 5
    assert found["lengths"]["max_length"] == 8
    assert found["lengths"]["suggested_max_length"] == 16
    train = found["lengths"]["splits"]["train"]
    assert (train["max"], train["cut_rows"], train["cut_share"]) == (9, 5, 0.25)
    assert "--max-length 16" in [change["remedy"] for change in found["suggestions"]]
    [warning] = found["warnings"]
    assert warning.startswith("1 of 21 rows")


def test_the_suggested_length_is_one_that_the_model_takes(
    tmp_path: Path, tiny_folder: Path
) -> None:
    path = tmp_path / "long.csv"
    lines = [f"{'word ' * 100}{number},{number % 2}" for number in range(20)]
    path.write_text("\n".join(["text,label", *lines]))
    lengths = check(path, tiny_folder)["lengths"]
    assert (lengths["suggested_max_length"], lengths["beyond_suggested"]) == (64, 20)


def test_splits_have_their_usual_order_whichever_the_table_has_first(
    tmp_path: Path, tiny_folder: Path
) -> None:
    path = tmp_path / "splits.csv"
    parts = ("test", "validation", "train") * 8
    lines = [f"row {number},{number % 2},{part}" for number, part in enumerate(parts)]
    path.write_text("\n".join(["text,label,split", *lines]))
    found = check(path, tiny_folder)
    assert list(found["rows"]) == list(found["classes"]) == ["train", "validation", "test"]


def test_texts_that_the_vocabulary_lacks_are_a_warning(tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "chinese.csv"
    lines = [f"今天天气很好 {number},{number % 2}" for number in range(20)]
    path.write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    found = check(path, tiny_folder)
    assert found["lengths"]["unknown_share"] > 0.05
    assert any("unknown to the vocabulary" in warning for warning in found["warnings"])


@pytest.mark.parametrize("model", ["acme/unknown", "."])
def test_without_a_tokenizer_the_rest_is_found(table: Path, model: str) -> None:
    emitted: list[Event] = []
    found = check(table, model, emitted=emitted)
    assert found["lengths"] is None
    assert found["rows"] == {"train": 20}
    warning = [event for event in emitted if isinstance(event, WarningMessage)][-1]
    assert "lengths of the texts are missing" in warning.message
    assert warning.remedy
    assert found["warnings"][-1] == warning.message


def test_the_tokenizer_comes_from_the_hub_without_the_weights(
    table: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    with (
        HubServer(models={"acme/tiny": tiny_folder}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        assert check(table, "acme/tiny")["lengths"]["splits"]["train"]["max"] == 9
        assert "tokenizer.json" in hub.downloads()
        assert "model.safetensors" not in hub.downloads()
