"""Each task type, from a table to predictions."""

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

import finetune
from finetune.errors import UsageError
from finetune.files import read_json, read_jsonl
from finetune.runs.compare import tabulate
from finetune.tasks.base import TASK_TYPES, Outputs, Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.tasks.tables import duration, format_value


@dataclass(frozen=True)
class Ordinal(Single):
    """Ordered classes. Each output answers "is it higher than the class below?"."""

    name: ClassVar[str] = "ordinal"

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        above = torch.arange(logits.shape[1], device=labels.device) <= labels[:, None]
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        return entropy(logits, above.float(), reduction="none").mean(dim=1)

    def read_logits(self, logits: NDArray[np.float32]) -> Outputs:
        levels = (logits[:, 1:] > 0).sum(axis=1)
        return super().read_logits(np.eye(logits.shape[1], dtype=np.float32)[levels])


TASK_TYPES.pop(Ordinal.name)  # other tests only use the task types of the package


def draw_rows() -> list[dict[str, Any]]:
    random, rows = np.random.default_rng(0), []
    for _ in range(120):
        words = random.choice(COMMON_WORDS.split(), size=random.integers(4, 9)).tolist()
        words += random.choice(["animal", "river", "word"], size=2).tolist()
        topics = {"pet": {"animal", "food"}, "place": {"city", "river", "country"}}
        rows.append(
            {
                "text": " ".join(words),
                "multi": "|".join(name for name, own in topics.items() if own & {*words}) or "[]",
                "regression": 1900.5 + 10 * len(words) + len("".join(words)) / 4,
                "ordinal": min(words.count("animal"), 2),
            }
        )
    return rows


ROWS = draw_rows()


def write_table(path: Path, label: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((row["text"], row[label]) for row in ROWS)
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
    """A finished run per task type, with ``--task auto``."""
    options = {"class_weights": "balanced"} if request.param == "multi" else {}
    return train(tmp_path_factory.mktemp(request.param), tiny_folder, request.param, **options)


def test_task_type_is_detected_and_saved_as_problem_type(run: Path) -> None:
    results, config = read_json(run / "all_results.json"), read_json(run / "model/config.json")
    expected = {"multi": "multi_label_classification", "regression": "regression"}
    assert config["problem_type"] == expected[results["task"]]
    own = config["task_specific_params"]["text-classification"]
    assert own["task"] == results["task"]
    if results["task"] == "multi":
        assert results["class_names"] == ["pet", "place"] == list(own["thresholds"])


def test_evaluate_reproduces_the_metrics_of_a_run(run: Path, tmp_path: Path) -> None:
    results = read_json(run / "all_results.json")
    scores = finetune.evaluate(run, device="cpu").scores.to_json()
    assert json.dumps(scores) == json.dumps({name: results[f"test_{name}"] for name in scores})
    losses = [row["loss"] for row in read_jsonl(run / "predictions.jsonl")]
    assert np.mean(losses) == pytest.approx(scores["loss"])
    other = write_table(tmp_path / "other.csv", results["task"])
    assert finetune.evaluate(run, data=other, device="cpu").scores.samples == len(ROWS)


def test_min_confidence_filters_labels_and_is_rejected_for_regression(run: Path) -> None:
    texts = [row["text"] for row in ROWS[:8]]
    if "regression" in str(run):
        with pytest.raises(UsageError, match="min_confidence can't be used with"):
            finetune.predict(run, texts, device="cpu", min_confidence=0.9)
        return
    found = finetune.predict(run, texts, device="cpu", all_scores=True)
    limit = max(one for row in found for one in row.label_probabilities)
    for row in found:
        assert row.label_probabilities == [row.probabilities[name] for name in row.labels]
    sure = finetune.predict(run, texts, device="cpu", min_confidence=limit)
    for before, row in zip(found, sure, strict=True):
        pairs = zip(before.labels, before.label_probabilities, strict=True)
        kept = [name for name, probability in pairs if probability >= limit]
        assert row.labels == (kept or (None if before.labels else []))
    assert sum(bool(row.labels) for row in sure) >= 1


def test_report_and_card_describe_the_task_type(run: Path) -> None:
    page, card = (run / "report.html").read_text(), (run / "model/README.md").read_text()
    if "multi" in str(run):
        assert "average precision" in page
        assert "A classifier of texts with any number of 2 classes each" in card
    else:
        assert "True and predicted values" in page
        assert "A regression model of texts" in card
        # Values have the units of the table, although the model learns standardized values.
        predictions = read_jsonl(run / "predictions.jsonl")
        assert all(1900 < row["predicted"] < 2100 for row in predictions)


def test_run_can_be_compared_with_a_perfect_run(run: Path, tmp_path: Path) -> None:
    rows = read_jsonl(run / "predictions.jsonl")
    other = copy_run(run, tmp_path / "other", answers=[row["label"] for row in rows])
    comparison = finetune.compare(run, other).groups[0]
    versus = comparison.runs[1].versus_reference
    assert versus is not None
    assert versus.better == sum(row["label"] != row["predicted"] for row in rows)
    assert versus.worse == 0
    assert (versus.p_value is None) == (comparison.task.name == "regression")
    titles = [table.title for table in tabulate(comparison)]
    assert titles[-1] == ("Only other closer" if "regression" in str(run) else "Only other correct")


@pytest.fixture
def ordinal() -> Iterator[None]:
    TASK_TYPES[Ordinal.name] = Ordinal
    yield
    del TASK_TYPES[Ordinal.name]


@pytest.mark.usefixtures("ordinal")
def test_custom_task_type_needs_only_one_class(tiny_folder: Path, tmp_path: Path) -> None:
    folder = train(tmp_path, tiny_folder, "ordinal", task="ordinal", num_train_epochs=1)
    results = read_json(folder / "all_results.json")
    assert results["task"] == "ordinal"
    assert results["test_accuracy"] == finetune.evaluate(folder, device="cpu").scores.accuracy
    [prediction] = finetune.predict(folder, ["animal animal"], device="cpu")
    assert prediction.label in results["class_names"]
    assert (folder / "report.html").is_file()


NAMES = ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]


def draw_logits(rows: int, *, temperature: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return logits and labels. The probabilities are calibrated at this temperature."""
    generator = np.random.default_rng(0)
    logits = 2 * generator.normal(size=(rows, 6))
    logits[np.arange(rows), generator.integers(6, size=rows)] += 6
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return (temperature * logits).astype(np.float32), labels


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_calibration_finds_the_temperature(temperature: float) -> None:
    rows = draw_logits(20_000, temperature=temperature)
    single = Single(NAMES).calibrate(lambda: rows, fits_temperature=True)
    assert single.temperature == pytest.approx(temperature, rel=0.03)

    right = np.random.default_rng(1).normal(size=(20_000, 2)).astype(np.float32)
    drawn = np.random.default_rng(2).logistic(size=right.shape)
    yes_or_no = (temperature * right, (right + drawn > 0).astype(np.float32))
    multi = Multi(NAMES[:2]).calibrate(lambda: yes_or_no, fits_temperature=True)
    assert multi.temperature == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize(
    "task", [Single(NAMES, temperature=1.7), Multi(NAMES, temperature=1.7)], ids=["single", "multi"]
)
def test_temperature_scaling_keeps_predictions_and_can_be_undone(task: Task) -> None:
    inputs = torch.randn(2_000, 16, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(16, 6)
    parameters, weight = list(layer.parameters()), layer.weight.detach().clone()

    def logits() -> NDArray[np.float32]:
        return layer(inputs).detach().numpy()

    first, before = logits(), task.read_logits(logits()).predicted
    scaled = task.scale_output_layer(parameters)
    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    assert (scaled.read_logits(logits()).predicted == before).all()

    # First a saved model that predicts, then a saved model that is trained further.
    scaled.unscale_output_layer(parameters, saved=scaled.parameters)
    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    type(task)(NAMES).unscale_output_layer(parameters, saved=scaled.parameters)
    assert torch.allclose(layer.weight, weight, rtol=1e-6)


def test_large_errors_are_printed_with_thousands_separators() -> None:
    rows = [{"text": "a house", "label": 250_000.0, "predicted": 12_345.6}]
    assert Regression().mistakes(rows).rows == [("a house", "250,000", "12,346", "237,654")]


@pytest.mark.parametrize("task", [Single(["a", "b"]), Regression()])
def test_mistakes_list_row_number_and_id(task: Task) -> None:
    label, predicted = ("a", "b") if task.class_names else (1.0, 3.0)
    values = {"label": label, "predicted": predicted, "probability": 0.9}
    mistakes = task.mistakes([{"text": "why", "id": "T-08", "row": 1_812, **values}])
    assert mistakes.columns[:3] == ("row", "id", "text")
    assert mistakes.rows[0][:3] == ("1812", "T-08", "why")
    plain = task.mistakes([{"text": "why", **values}])
    assert plain.columns == mistakes.columns[2:]
    assert plain.text_columns == mistakes.text_columns - 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (1234.5678, "1,235"),
        (5e-5, "5e-05"),
        ({"a": 1000, "b": "c"}, "a: 1,000, b: c"),
        ([True, None], "on, –"),
        ([], "none"),
    ],
)
def test_values_are_formatted_for_readers(value: object, shown: str) -> None:
    assert format_value(value) == shown


def test_durations_have_suitable_units() -> None:
    shown = [duration(seconds) for seconds in (0.04, 9.53, 9.96, 59.6, 1453, 8040)]
    assert shown == ["0.0 s", "9.5 s", "10 s", "1 min 0 s", "24 min 13 s", "2 h 14 min"]


@pytest.mark.parametrize(
    ("rows", "mistakes", "is_calibrated"), [(99, 20, False), (200, 4, False), (200, 20, True)]
)
def test_calibration_needs_enough_rows_and_mistakes(
    rows: int, mistakes: int, is_calibrated: bool
) -> None:
    logits = np.tile(np.array([3, -3], np.float32), (rows, 1))
    labels = (np.arange(rows) < mistakes).astype(np.int64)
    task = Single(["a", "b"]).calibrate(lambda: (logits, labels), fits_temperature=True)
    assert (task.temperature != 1) == is_calibrated
