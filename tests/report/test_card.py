from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from finetune.files import write_json
from finetune.report.card import write_model_card
from finetune.runs.folder import RunFolder

RESULTS = {
    "model": "bert-base-uncased",
    "data": "trec",
    "mode": "head",
    "device": "cpu",
    "precision": "fp32",
    "train_runtime": 83.2,
    "train_samples": 4906,
    "trained_parameters": 770,
    "total_parameters": 109_483_778,
    "test_accuracy": 0.75,
    "test_macro_f1": 0.7333,
    "class_names": ["DESC", "a|b\n<i>"],
    "test_per_class": {
        "DESC": {"precision": 0.667, "recall": 1.0, "f1": 0.8, "support": 2},
        "a|b\n<i>": {"precision": 1.0, "recall": 0.5, "f1": 0.667, "support": 2},
    },
    "test_confusion_matrix": [[2, 0], [1, 1]],
}


def card_of(
    tmp_path: Path, *, model: str = "bert-base-uncased", data: str = "trec", **data_options: Any
) -> ModelCard:
    folder = RunFolder(tmp_path / "my-run")
    folder.model_folder.mkdir(parents=True)
    config = {
        "data": {"data": data, "data_dir": None, "label": "label-coarse", **data_options},
        "model": {"model": model, "revision": None, "max_length": 48},
        "training": {"device": "auto", "learning_rate": 0.001, "max_steps": None},
        "output": {"output_dir": str(folder.path)},
    }
    folder.config_file.write_text(yaml.safe_dump(config), encoding="utf-8")
    write_json(folder.results_file, RESULTS | {"model": model, "data": data})
    path = write_model_card(folder)
    assert path == folder.model_folder / "README.md"
    return ModelCard.load(path)


def test_metadata_is_what_the_hub_reads(tmp_path: Path) -> None:
    card = card_of(tmp_path)

    assert card.data.base_model == "bert-base-uncased"
    assert card.data.datasets == ["CogComp/trec"]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.model_name == "my-run"
    accuracy, macro_f1 = card.data.eval_results
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", 0.75)
    assert (macro_f1.metric_name, macro_f1.metric_value) == ("Macro F1", 0.7333)
    assert (accuracy.dataset_type, accuracy.dataset_config) == ("CogComp/trec", "label-coarse")


def test_body_tells_use_figures_training_and_limits(tmp_path: Path) -> None:
    text = card_of(tmp_path).text

    for emitted in (
        *("# my-run", 'pipeline("text-classification"', "max_length=48"),
        *("4 rows of the test split", "**75.0 %**", "**73.3 %**"),
        "| DESC | 66.7 % | 100.0 % | 80.0 % | 2 |",
        *("770 of 109,483,778 parameters", "4,906 rows", "83 seconds"),
        "## Limits",
    ):
        assert emitted in text


def test_names_of_classes_do_not_break_the_table(tmp_path: Path) -> None:
    assert "| a\\|b &lt;i&gt; | 100.0 % | 50.0 % | 66.7 % | 2 |" in card_of(tmp_path).text


def test_configuration_in_the_card_reads_back(tmp_path: Path) -> None:
    block = card_of(tmp_path).text.split("```yaml\n")[1].split("```")[0]

    assert yaml.safe_load(block) == {
        "data": {"data": "trec", "label": "label-coarse"},
        "model": {"model": "bert-base-uncased", "max_length": 48},
        "training": {"device": "auto", "learning_rate": 0.001},
    }


def test_short_name_of_minilm_becomes_its_hub_id(tmp_path: Path) -> None:
    card = card_of(tmp_path, model="minilm", data="questions")

    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert card.data.datasets is None


@pytest.mark.parametrize(
    "name", ["{tmp_path}/secret/encoder", "~/secret/encoder", "../secret/encoder"]
)
def test_folders_of_this_machine_do_not_show(tmp_path: Path, name: str) -> None:
    card = card_of(
        tmp_path,
        model=name.format(tmp_path=tmp_path),
        data=str(tmp_path / "secret" / "questions.csv"),
        data_dir=str(tmp_path / "secret"),
        test_file=str(tmp_path / "secret" / "test.csv"),
    )

    assert card.data.base_model is None
    assert "`encoder`, fine-tuned on `questions.csv`" in card.text
    assert "secret" not in card.content
    assert str(tmp_path) not in card.content


def test_folder_that_looks_like_a_hub_id_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "encoder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    card = card_of(tmp_path, model="models/encoder")

    assert card.data.base_model is None
    assert "models/" not in card.content


def test_data_of_the_hub_is_named_by_its_id(tmp_path: Path) -> None:
    card = card_of(tmp_path, data="hub:owner/reviews@main")

    assert card.data.datasets == ["owner/reviews"]
    assert "`owner/reviews`" in card.text
