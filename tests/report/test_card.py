import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from tiny_runs import TEXTS, run_tiny

import finetune
from finetune.config.load import dump_config, load_config
from finetune.config.schema import Config
from finetune.report.card import write_cards
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import write_inference
from finetune.runs.results import RunResults

MakeCard = Callable[..., ModelCard]


@pytest.fixture
def make_card(tmp_path: Path, results: RunResults) -> MakeCard:
    """Return a function that writes the model card of a run with these options and metrics."""

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


def test_metadata_has_the_format_of_the_hub(make_card: MakeCard) -> None:
    card = make_card()

    assert card.data.base_model == "bert-base-uncased"
    assert card.data.datasets == ["CogComp/trec"]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.model_name == "my-run"
    accuracy, macro_f1 = card.data.eval_results
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", 0.75)
    assert (macro_f1.metric_name, macro_f1.metric_value) == ("Macro F1", 0.7333)
    assert (accuracy.dataset_type, accuracy.dataset_config) == ("CogComp/trec", "label-coarse")


def test_body_describes_use_metrics_training_and_limits(make_card: MakeCard) -> None:
    text = make_card().text

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


def test_configuration_in_the_card_can_be_loaded(tmp_path: Path, make_card: MakeCard) -> None:
    block = make_card(split_seed=7).text.split("```yaml\n")[1].split("```")[0]

    file = tmp_path / "mine.yaml"
    file.write_text(block, encoding="utf-8")
    loaded = load_config(file=str(file), environment={}, flags={}, assignments=()).config
    assert (loaded.model.max_length, loaded.data.split_seed) == (48, 7)
    assert yaml.safe_load(block).keys() == {"data", "model", "training"}
    assert "null" not in block


@pytest.mark.parametrize(
    "name", ["{tmp_path}/secret/encoder", "~/secret/encoder", "../secret/encoder"]
)
def test_local_paths_are_hidden(tmp_path: Path, name: str, make_card: MakeCard) -> None:
    card = make_card(
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
def test_hub_models_and_datasets_are_listed_with_their_ids(
    model: str, data: str, base_model: str, datasets: list[str] | None, make_card: MakeCard
) -> None:
    card = make_card(model=model, data=data)
    assert (card.data.base_model, card.data.datasets) == (base_model, datasets)


LONG = " ".join(TEXTS)
WINDOWS = {"long_texts": "windows", "max_length": 10, "stride": 2}
LORA = {"lora_rank": 4, "contrastive": "off"}


def make_label(label: str, word: str, number: int) -> dict[str, Any]:
    """Return the label of a row and, for pairs, the second text."""
    match label:
        case "pair":
            return {"label": word, "text_pair": f"it is {number}"}
        case "score":
            return {"label": number / 7}
        case "several":
            return {"label": f"{word}|odd" if number % 2 else word}
    return {"label": word}


def read_answer(variables: dict[str, Any]) -> tuple[list[str], float]:
    """Return the labels and the highest score, from the logits if the code computes logits."""
    if "logits" not in variables:
        answer = variables["answer"]
        [answer] = answer if isinstance(answer, list) else [answer]
        return [answer["label"]], answer["score"]
    logits, config = variables["logits"], variables["classify"].model.config
    assert len(variables["windows"]["input_ids"]) > 1
    if config.problem_type == "regression":
        return ["LABEL_0"], logits.item()
    if config.problem_type == "multi_label_classification":
        thresholds = config.task_specific_params["text-classification"]["thresholds"]
        scores = logits.sigmoid()
        chosen = scores >= torch.tensor([*thresholds.values()])
    else:
        scores = logits.softmax(-1)
        chosen = scores == scores.max()
    names = [config.id2label[number] for number in chosen.nonzero().flatten().tolist()]
    return names, scores.max().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("word", {}),
        ("word", {"pooling": "mean", **WINDOWS}),
        ("word", LORA | WINDOWS),
        ("pair", LORA),
        ("score", WINDOWS),
        ("score", LORA),
        ("several", LORA | WINDOWS),
    ],
)
def test_code_in_each_card_predicts_like_the_run(
    label: str,
    options: dict[str, Any],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        {"text": f"{word} is it {number} ?", **make_label(label, word, number)}
        for number in range(30)
        for word in ("who", "where")
    ]
    monkeypatch.chdir(tiny_folder.parent)  # the card contains only the folder name
    run_tiny(tmp_path / "run", model=tiny_folder, data=rows, num_train_epochs=1, **options)
    text = (LONG, "it is 7") if label == "pair" else LONG
    [expected] = finetune.predict(tmp_path / "run", [text], device="cpu")
    cards = [*tmp_path.glob("run/*/README.md")]
    assert len(cards) == 1 + ("lora_rank" in options)
    for card in cards:
        code = "".join(re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL))
        code = re.sub(r"(?m)^classify\(", "answer = classify(", code)
        code = code.replace("path/to/this/folder", str(card.parent))
        code = code.replace("Your text here", LONG).replace("Your second text here", "it is 7")
        variables: dict[str, Any] = {}
        exec(code, variables)
        labels, score = read_answer(variables)
        if label == "score":
            assert score == pytest.approx(expected.value, abs=1e-4)
        elif label == "several":
            assert labels == expected.labels
        else:
            assert (labels, score) == (
                [expected.label],
                pytest.approx(expected.probability, abs=1e-4),
            )
