"""Runs on texts that are longer than the model's input."""

import re
from pathlib import Path
from typing import Any

import pytest
from prepared_runs import prepare_tiny
from tiny_runs import TEXTS, run_tiny

import finetune
from finetune.errors import ConfigurationError
from finetune.files import read_json

LONG = " ".join(TEXTS)
WINDOWS: dict[str, Any] = {
    "long_texts": "windows",
    "max_length": 10,
    "stride": 2,
    "batch_size": 4,
    "effective_batch_size": 16,
    "max_train_samples": 32,
    "num_train_epochs": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "windows"
    run_tiny(folder, model=tiny_folder, **WINDOWS)
    return folder


def code_of_card(run: Path, *, text: str) -> dict[str, Any]:
    """Run the last code block of a run's model card on a text; return its variables."""
    card = (run / "model" / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    names: dict[str, Any] = {}
    code = code.replace("path/to/this/folder", str(run / "model")).replace("Put a text here", text)
    exec(code, names)
    return names


def test_evaluate_predict_and_the_cards_code_agree_with_the_run(run: Path) -> None:
    results = read_json(run / "all_results.json")
    scores = finetune.evaluate(run, device="cpu").scores
    [answer] = finetune.predict(run, [LONG], device="cpu")
    names = code_of_card(run, text=LONG)

    assert scores.to_json()["loss"] == pytest.approx(results["test_loss"], abs=1e-6)
    assert len(names["windows"]["input_ids"]) > 1
    probability, number = names["logits"].softmax(-1).max(-1)
    assert names["model"].config.id2label[number.item()] == answer.label
    assert answer.probability == pytest.approx(probability.item(), abs=1e-5)


def test_pairs_and_strides_as_long_as_a_window_are_refused(tiny_folder: Path) -> None:
    text_model = prepare_tiny(tiny_folder, max_train_samples=8).text_model
    with pytest.raises(ConfigurationError, match="windows can't be used with sentence pairs"):
        text_model.encode(["a"], ["b"], max_length=10, stride=2)
    with pytest.raises(ConfigurationError, match="--stride 8 is too large: a window contains"):
        prepare_tiny(tiny_folder, **WINDOWS | {"stride": 8})
