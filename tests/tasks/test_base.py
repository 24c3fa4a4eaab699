"""Each kind from a table to its answers: one run for all that is asked of it."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import COMMON_WORDS
from tiny_runs import copy_run, run_tiny
from transformers import pipeline

import finetune
from finetune.errors import UsageError
from finetune.files import read_json, read_jsonl
from finetune.report.compare import tabulate
from finetune.tasks.base import TASK_TYPES, Outputs
from finetune.tasks.single import Single

WORDS = COMMON_WORDS.split()
ANIMALS, PLACES = {"animal", "food"}, {"city", "river", "country"}


@dataclass(frozen=True)
class Ordinal(Single):
    """Ordered classes: one more output for each is a yes to "higher than the class below"."""

    name: ClassVar[str] = "ordinal"

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        above = torch.arange(logits.shape[1], device=labels.device) <= labels[:, None]
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        return entropy(logits, above.float(), reduction="none").mean(dim=1)

    def read_logits(self, logits: NDArray[np.float32]) -> Outputs:
        levels = (logits[:, 1:] > 0).sum(axis=1)
        return super().read_logits(np.eye(logits.shape[1], dtype=np.float32)[levels])


TASK_TYPES.pop(Ordinal.name)  # other tests know the kinds of the package alone


def texts_with_labels() -> list[tuple[str, dict[str, Any]]]:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(120):
        words = random.choice(WORDS, size=random.integers(4, 9)).tolist()
        words += random.choice(["animal", "river", "word"], size=2).tolist()
        topics = [name for name, own in (("pet", ANIMALS), ("place", PLACES)) if own & {*words}]
        stars = min(words.count("animal"), 2)
        labels = {
            "multi": "|".join(topics),
            "regression": 1900.5 + 10 * len(words) + len("".join(words)) / 4,
            "stars": stars,
        }
        rows.append((" ".join(words), labels))
    return rows


ROWS = texts_with_labels()


def write_table(path: Path, label: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((text, labels[label]) for text, labels in ROWS)
    return path


def train(folder: Path, model: Path, label: str, **options: Any) -> Path:
    table = write_table(folder / "rows.csv", label)
    options = {"max_train_samples": None, "num_train_epochs": 4, **options}
    run_tiny(folder / "run", model=model, data=table, **options)
    return folder / "run"


@pytest.fixture(scope="module", params=["multi", "regression"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> Path:
    """A finished run of each kind, which ``--task auto`` has found."""
    options = {"class_weights": "balanced"} if request.param == "multi" else {}
    return train(tmp_path_factory.mktemp(request.param), tiny_folder, request.param, **options)


def test_the_kind_is_found_and_saved_as_transformers_names_it(run: Path) -> None:
    results, config = read_json(run / "all_results.json"), read_json(run / "model/config.json")
    expected = {"multi": "multi_label_classification", "regression": "regression"}
    assert config["problem_type"] == expected[results["task"]]
    assert results["task"] in str(run)
    own = config["task_specific_params"]["text-classification"]
    assert own["task"] == results["task"]
    if results["task"] == "multi":
        assert results["class_names"] == ["pet", "place"] == list(own["thresholds"])


def test_the_pipeline_gives_the_same_answers(run: Path) -> None:
    texts = [text for text, _ in ROWS[:5]]
    answers = finetune.predict(run, texts, device="cpu", all_scores=True)
    found = pipeline("text-classification", model=str(run / "model"), top_k=None)(texts)
    for answer, scores in zip(answers, found, strict=True):
        own = answer.result
        expected = own.get("probabilities") or {"LABEL_0": own["value"]}
        by_name = {one["label"]: one["score"] for one in scores}
        assert by_name == pytest.approx(expected, rel=1e-4)


def test_a_run_is_evaluated_again_to_the_same_metrics(run: Path, tmp_path: Path) -> None:
    results = read_json(run / "all_results.json")
    scores = finetune.evaluate(run, device="cpu").scores.to_json()
    own = {name: results[f"test_{name}"] for name in scores}
    assert json.dumps(scores) == json.dumps(own)
    other = write_table(tmp_path / "other.csv", results["task"])
    assert finetune.evaluate(run, data=other, device="cpu").scores.samples == len(ROWS)


def test_only_one_label_a_text_can_be_left_out(run: Path) -> None:
    with pytest.raises(UsageError, match="does not give one label"):
        finetune.predict(run, ["a text"], device="cpu", min_confidence=0.9)


def test_report_and_card_show_the_kind(run: Path) -> None:
    page, card = (run / "report.html").read_text(), (run / "model/README.md").read_text()
    if "multi" in str(run):
        assert "average precision" in page
        assert "A classifier of texts with any number of 2 classes each" in card
    else:
        assert "True and predicted numbers" in page
        assert "A regression model of texts" in card
        predictions = read_jsonl(run / "predictions.jsonl")
        # In the units of the table, which were learned as standard deviations from the mean.
        assert all(1900 < row["predicted"] < 2100 for row in predictions)


def test_a_run_is_compared_with_one_that_answers_otherwise(run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(run / "predictions.jsonl")
    other = copy_run(run, tmp_path / "other", answers=[row["label"] for row in rows])
    comparison = finetune.compare(run, other)
    versus = comparison.runs[1].versus
    assert versus is not None
    # The other has all rows right.
    assert (versus.better, versus.worse) == (
        sum(row["label"] != row["predicted"] for row in rows),
        0,
    )
    assert (versus.p_value is None) == (comparison.task.name == "regression")
    titles = [table.title for table in tabulate(comparison)]
    assert titles[0] == f"Metrics on {len(rows)} test rows"
    assert titles[-1] == ("other closer" if "regression" in str(run) else "Only other correct")


@pytest.fixture
def ordinal() -> Iterator[None]:
    TASK_TYPES[Ordinal.name] = Ordinal
    yield
    del TASK_TYPES[Ordinal.name]


@pytest.mark.usefixtures("ordinal")
def test_a_kind_of_ones_own_is_one_class(tiny_folder: Path, tmp_path: Path) -> None:
    folder = train(tmp_path, tiny_folder, "stars", task="ordinal", num_train_epochs=1)
    results = read_json(folder / "all_results.json")
    assert results["task"] == "ordinal"
    assert results["test_accuracy"] == finetune.evaluate(folder, device="cpu").scores.accuracy
    [answer] = finetune.predict(folder, ["animal animal"], device="cpu")
    assert answer.label in results["class_names"]
    assert (folder / "report.html").is_file()
