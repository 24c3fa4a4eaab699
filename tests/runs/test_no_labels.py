"""Runs without labels, on class names and unlabeled texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prepared_runs import was_emitted
from tiny_runs import Command, have_same_bits, weights_of
from transformers import pipeline

import finetune
from finetune.errors import ConfigurationError, DataError, InterruptionError, UsageError
from finetune.events import Event, Info, WarningMessage
from finetune.files import read_json
from finetune.runs.linear_head import LinearHeadFitter
from finetune.runs.run import Run
from finetune.tokenization.examples import Examples
from finetune.training import plan

KINDS = {"billing": "the invoice", "login": "the password", "refund": "the money"}
ROWS = [(f"{thing} of order {n} is wrong", name) for n in range(8) for name, thing in KINDS.items()]
CLASSES = ",".join(KINDS)
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 24 texts, with a column that looks like labels but isn't the label."""
    path = tmp_path_factory.mktemp("texts") / "tickets.csv"
    rows = [f"{n},{text},{('mail', 'phone')[n % 2]}" for n, (text, _) in enumerate(ROWS)]
    path.write_text("\n".join(["id,body,channel", *rows]))
    return path


@pytest.fixture(scope="module")
def train(table: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A function that trains on the table and returns the run folder."""

    def train_one(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "run"
        quick = {"model": str(tiny_folder), "device": "cpu", "precision": "fp32"}
        quick |= {"data": str(table), "output_dir": str(folder)}
        finetune.run(**(quick | options))
        return folder

    return train_one


@pytest.fixture(scope="module")
def run(train: Train) -> Path:
    """A finished run without labels. Tests don't change it."""
    return train(classes=CLASSES)


def test_results_show_texts_of_each_class_without_claiming_accuracy(run: Path) -> None:
    results = read_json(run / "all_results.json")
    unlabeled = results["details"]["no_labels"]
    assert unlabeled["texts"] == len(ROWS)
    assert [*unlabeled["classes"]] == [*KINDS]
    assert sum(shown["fraction"] for shown in unlabeled["classes"].values()) == pytest.approx(1)
    shown = [text for each in unlabeled["classes"].values() for text in each["certain"]]
    assert {*shown} <= {text for text, _ in ROWS}
    assert results["test_samples"] == 0
    assert not any("accuracy" in name for name in results)
    report, card = (run / "report.html").read_text(), (run / "model/README.md").read_text()
    for page in (report, card):
        assert "Its accuracy is unknown" in page
        assert "not calibrated" in page
    assert shown[0] in report


def test_output_suggests_how_to_measure_the_accuracy(
    run: Path, table: Path, tiny_folder: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ("--classes", CLASSES, "--model", tiny_folder, "--device", "cpu")
    outcome = command("run", table, *arguments, "--precision", "fp32", "--output-dir", tmp_path)
    assert outcome.code == 0
    assert outcome.output.splitlines()[-3:-1] == [
        f"Next: finetune label {table} --classes {CLASSES}",
        f"      finetune evaluate {tmp_path} {table.with_name('tickets.labels.csv')}",
    ]
    listed = command("runs", run.parent)
    assert (listed.code, "finished" in listed.output) == (0, True)


def test_pipeline_predicts_like_the_run(run: Path) -> None:
    texts = [text for text, _ in ROWS]
    classify = pipeline("text-classification", model=str(run / "model"))
    for answer, expected in zip(finetune.predict(run, texts), classify(texts), strict=True):
        assert answer.label == expected["label"]
        assert answer.probability == pytest.approx(expected["score"], abs=1e-4)


def test_labeled_test_file_is_scored(train: Train, run: Path, tmp_path: Path) -> None:
    labeled = tmp_path / "test.csv"
    labeled.write_text("\n".join(["body,label", *(f"{text},{name}" for text, name in ROWS)]))
    tested = train(classes=CLASSES, test_file=str(labeled))
    assert have_same_bits(weights_of(run), weights_of(tested))
    assert read_json(tested / "all_results.json")["test_samples"] == len(ROWS)
    assert finetune.evaluate(tested).scores.samples == len(ROWS)
    assert finetune.evaluate(run, data=str(labeled)).scores.samples == len(ROWS)


def test_class_descriptions_replace_names_and_are_averaged(
    train: Train, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "classes.csv"
    rows = [f"{name},{thing}" for name, thing in KINDS.items()]
    file.write_text("\n".join(["class,description", *rows, "refund,give it back"]))
    described = train(class_descriptions=str(file))
    results = read_json(described / "all_results.json")
    assert results["class_names"] == [*KINDS]
    assert results["train_samples"] == 4
    assert not have_same_bits(weights_of(run), weights_of(described))


def test_python_api_accepts_lists_of_texts_and_classes_and_a_dict(train: Train, run: Path) -> None:
    texts = [text for text, _ in ROWS]
    assert have_same_bits(weights_of(run), weights_of(train(data=texts, classes=[*KINDS])))
    described = train(data=texts, class_descriptions={name: ["a", name] for name in KINDS})
    assert read_json(described / "all_results.json")["train_samples"] == 6
    with pytest.raises(UsageError, match="contains a comma"):
        train(data=texts, classes=["a, b", "c"])


def test_stopped_run_resumes_bit_identically(
    train: Train, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop_with_ctrl_c(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", stop_with_ctrl_c)
        with pytest.raises(InterruptionError):
            train(classes=CLASSES, output_dir=str(tmp_path / "run"))
    finetune.run(resume_from_checkpoint=tmp_path / "run")
    assert have_same_bits(weights_of(run), weights_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"train_layers": 1}, ConfigurationError, "train_layers can't be used without labels"),
        ({"contrastive": "on"}, ConfigurationError, "contrastive on can't be used without"),
        ({"loss": "focal"}, ConfigurationError, "loss focal can't be used without labels"),
        ({"folds": 2}, DataError, "has no labels, but folds needs them"),
        ({"task": "multi"}, UsageError, "has no labels, but task multi needs them"),
        ({"classes": "billing"}, UsageError, "fewer than two classes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_need_labels_are_rejected(
    options: dict[str, Any], error: type[Exception], words: str, train: Train
) -> None:
    with pytest.raises(error, match=words):
        train(**({"classes": CLASSES} | options))


def test_training_options_are_reported_as_without_effect(train: Train) -> None:
    events: list[Event] = []
    train(classes=CLASSES, class_weights="balanced", learning_rate=1e-3, emit=events.append)
    assert was_emitted(events, WarningMessage, "class-weights has no effect without labels")
    assert was_emitted(events, WarningMessage, "learning-rate has no effect without labels")


@pytest.mark.parametrize(
    ("column", "labels"), [("label", ["", "", ""]), ("rating", [1, 2, 3]), ("row", ["", "", ""])]
)
def test_columns_without_classes_are_not_labels(
    column: str, labels: list[Any], train: Train
) -> None:
    events: list[Event] = []
    rows = {"text": [text for text, _ in ROWS], column: labels * 8}
    train(data=rows, classes=CLASSES, emit=events.append)
    assert was_emitted(events, Info, "24 different texts without labels, 3 classes")


@pytest.mark.parametrize(
    ("column", "labels", "options", "words"),
    [
        ("label", ["fee", "log in", "back"], {"classes": CLASSES}, "that classes doesn't list: "),
        ("kind", ["billing", "login", "refnud"], {"classes": CLASSES}, "classes: refnud"),
        ("kind", ["Billing", "Login", "Refund"], {"classes": CLASSES}, "classes: Billing, Login"),
        ("kind", ["Billing", "Login", "Refund"], {"class_descriptions": KINDS}, "are not classes"),
    ],
)
def test_labels_that_differ_from_the_classes_are_rejected(
    column: str, labels: list[str], options: dict[str, Any], words: str, train: Train
) -> None:
    rows = {"text": [text for text, _ in ROWS], column: labels * 8}
    with pytest.raises(DataError, match=words):
        train(data=rows, **options)


def test_class_without_labeled_rows_is_learned_from_its_name(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Examples] = []

    def find_rows(*arguments: Any) -> Examples:
        chosen.append(original(*arguments))
        return chosen[0]

    original = LinearHeadFitter._find_rows
    monkeypatch.setattr(LinearHeadFitter, "_find_rows", find_rows)
    for limit in ("MIN_STEPS", "MAX_STEPS"):
        monkeypatch.setattr(plan, limit, 3)
    rows = [row for row in ROWS if row[1] != "refund"]
    labeled = {"text": [text for text, _ in rows], "label": [name for _, name in rows]}
    unlabeled = [text.replace("order", "parcel") for text, _ in ROWS]
    events: list[Event] = []
    run = train(data=labeled, classes=CLASSES, unlabeled=unlabeled, emit=events.append)
    known = "without a labeled row, these are known from their names: refund"
    assert was_emitted(events, Info, known)
    assert [*read_json(run / "model/config.json")["id2label"].values()] == [*KINDS]
    assert read_json(run / "all_results.json")["details"]["class_rows"]["refund"] == 0
    assert {*chosen[0].labels} <= {2}
    assert len(chosen[0].labels) <= 8
