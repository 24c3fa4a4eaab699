from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from finetune.config.load import dump_config, load_config
from finetune.config.schema import Config
from finetune.report.card import write_cards
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import write_inference
from finetune.runs.results import RunResults

CardOf = Callable[..., ModelCard]


@pytest.fixture
def card_of(tmp_path: Path, results: RunResults) -> CardOf:
    """Return a function that writes the card of a run with other options and metrics."""

    def write(*, model: str = "bert-base-uncased", test: Any = None, **data: Any) -> ModelCard:
        folder = RunFolder(tmp_path / "my-run")
        folder.model_folder.mkdir(parents=True)
        config = replace(
            Config(),
            data=replace(Config().data, **data),
            model=replace(Config().model, model=model, max_length=48),
        )
        folder.config_file.write_text(dump_config(config), encoding="utf-8")
        write_inference(folder, config, max_tokens=512, reads_pairs=False)
        facts = replace(results.facts, model=model, data=config.data.data)
        scores = replace(results.test, **(test or {}))
        write_cards(folder, replace(results, facts=facts, test=scores))
        return ModelCard.load(folder.model_folder / "README.md")

    return write


def test_metadata_is_what_the_hub_reads(card_of: CardOf) -> None:
    card = card_of()

    assert card.data.base_model == "bert-base-uncased"
    assert card.data.datasets == ["CogComp/trec"]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.model_name == "my-run"
    accuracy, macro_f1 = card.data.eval_results
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", 0.75)
    assert (macro_f1.metric_name, macro_f1.metric_value) == ("Macro F1", 0.7333)
    assert (accuracy.dataset_type, accuracy.dataset_config) == ("CogComp/trec", "label-coarse")


def test_body_tells_use_figures_training_and_limits(card_of: CardOf) -> None:
    text = card_of().text

    for emitted in (
        "Validation accuracy **87.5%**, 95% CI 39.6–98.7%, on 4 held-out rows.",
        *("# my-run", 'pipeline("text-classification"', "truncation=True"),
        "Accuracy 75% on 4 test rows (95% CI 30–95%), which may be no better than the",
        *("On the test split: accuracy **75.0%**, macro F1 **73.3%**", "## Limits\n\n- Every"),
        "| DESC | 66.7% | 100.0% | 34.2–100.0% | 80.0% | 2 |",
        *("770 of 109,483,778 parameters", "4,906 rows", "83 seconds"),
        "## Limits",
    ):
        assert emitted in text


def test_configuration_in_the_card_reads_back(tmp_path: Path, card_of: CardOf) -> None:
    block = card_of(split_seed=7).text.split("```yaml\n")[1].split("```")[0]

    file = tmp_path / "mine.yaml"
    file.write_text(block, encoding="utf-8")
    loaded = load_config(file=str(file), environment={}, flags={}, assignments=()).config
    assert (loaded.model.max_length, loaded.data.split_seed) == (48, 7)
    assert yaml.safe_load(block).keys() == {"data", "model", "training"}
    assert "null" not in block


@pytest.mark.parametrize(
    "name", ["{tmp_path}/secret/encoder", "~/secret/encoder", "../secret/encoder"]
)
def test_folders_of_this_machine_do_not_show(tmp_path: Path, name: str, card_of: CardOf) -> None:
    card = card_of(
        model=name.format(tmp_path=tmp_path),
        data=str(tmp_path / "secret" / "questions.csv"),
        data_dir=str(tmp_path / "secret"),
        test_file=str(tmp_path / "secret" / "test.csv"),
    )

    assert card.data.base_model is None
    assert "`encoder`, fine-tuned on `questions.csv`" in card.text
    assert "secret" not in card.content
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("model", "data", "base_model", "datasets"),
    [
        ("minilm", "questions", "sentence-transformers/all-MiniLM-L6-v2", None),
        ("owner/model", "hub:owner/reviews@main", "owner/model", ["owner/reviews"]),
    ],
)
def test_models_and_data_of_the_hub_have_their_ids(
    model: str, data: str, base_model: str, datasets: list[str] | None, card_of: CardOf
) -> None:
    card = card_of(model=model, data=data)
    assert (card.data.base_model, card.data.datasets) == (base_model, datasets)
