"""Runs on few labels, with few-shot training or a linear head on the frozen encoder."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_runs import prepare_tiny, was_emitted
from tiny_models import save_tiny_model
from tiny_runs import (
    at,
    have_same_bits,
    logged_metrics,
    press_ctrl_c,
    slow,
    unfinished_files,
    weights_of,
)
from transformers import pipeline

import finetune
from finetune.commands.models import read_encoders
from finetune.config.schema import change_options
from finetune.errors import InterruptionError
from finetune.events import Event, Info, Stage, Step, WarningMessage, sent_to
from finetune.files import read_json, read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.prepare import prepare_variant
from finetune.runs.run import Run
from finetune.training import plan

STEPS = 6
TRAINING_METHODS: list[dict[str, Any]] = [{}, {"freeze_core": True}]
IDS = ["contrastive", "linear head"]
LISTED = {encoder["config"]["model_type"] for encoder in read_encoders()}
CLASSES = {"person": "who wrote {}?", "number": "how many {} are there?", "place": "where is {}?"}
THINGS = ("the city", "an animal", "water", "a river", "the book of 12", "food", "a hill", "a name")


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("MIN_STEPS", "MAX_STEPS"):
            patch.setattr(plan, limit, STEPS)
        yield


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tables of 15 training rows, with a single row of one class, and of ten test rows."""
    kinds = CLASSES.items()
    rows = [f"{question.format(one)},{name}" for one in THINGS for name, question in kinds]
    folder, files = tmp_path_factory.mktemp("few"), {"data": rows[:14], "test_file": rows[14:]}
    files["data"] += ["what color is it?,color"]
    for name, lines in files.items():
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    return {name: str(folder / f"{name}.csv") for name in files}


Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tables: dict[str, str], tiny_folder: Path) -> Train:
    """A function that trains on few labels and returns the run folder."""

    def train_one(folder: Path, **options: Any) -> Path:
        quick = {"model": str(tiny_folder), "device": "cpu", "precision": "fp32"}
        quick |= {"logging_steps": 1, "save_steps": 2, "output_dir": str(folder)}
        finetune.run(**(tables | quick | options))
        return folder

    return train_one


@pytest.fixture(scope="module", params=TRAINING_METHODS, ids=IDS)
def few_run(
    request: pytest.FixtureRequest, train: Train, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Event], dict[str, Any]]:
    """A finished run per training method, with its events and options. Tests don't change it."""
    events: list[Event] = []
    folder = tmp_path_factory.mktemp("runs") / "few"
    return train(folder, emit=events.append, **request.param), events, request.param


FewRun = tuple[Path, list[Event], dict[str, Any]]


def test_training_method_is_reported_once(few_run: FewRun) -> None:
    run, events, options = few_run
    words = "frozen encoder" if options else "few-shot, because there are only 4"
    infos = [event.message for event in events if isinstance(event, Info)]
    [method] = [message for message in infos if message.startswith("training method: ")]
    assert words in method
    steps = 0 if options else STEPS
    assert len([event for event in events if isinstance(event, Step)]) == steps
    results = read_json(run / "all_results.json")
    assert results["global_step"] == results["best_global_step"] == max(1, steps)
    assert np.isfinite(results["train_loss"])
    config = RunFolder(run).read_config()
    assert config.training.contrastive == ("off" if options else "on")
    assert (config.training.fit_head, config.model.pooling) == ("on", "mean")
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("stop", [(Step, 3), slow((Step, STEPS)), slow((Stage, "test"))])
@pytest.mark.parametrize("few_run", TRAINING_METHODS[:1], ids=IDS[:1], indirect=True)
def test_run_stopped_during_contrastive_training_resumes_bit_identically(
    stop: tuple[Any, Any], few_run: FewRun, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with suppress(InterruptionError):  # no step is left after the last step
        train(run, emit=at(*stop, press_ctrl_c))
    if not (run / "all_results.json").exists():
        finetune.run(resume_from_checkpoint=run)
    assert have_same_bits(weights_of(run), weights_of(few_run[0]))
    assert logged_metrics(run) == logged_metrics(few_run[0])
    for name in ("config.yaml", "predictions.jsonl"):
        assert (run / name).read_bytes() == (few_run[0] / name).read_bytes()
    assert unfinished_files(run) == []


@pytest.mark.parametrize(
    "options",
    [
        {"train_layers": 1},
        slow({"long_texts": "windows", "max_length": 8, "stride": 2}),
        {"freeze_core": True, "long_texts": "windows", "max_length": 8, "stride": 2},
        slow({"gradient_checkpointing": True, "class_weights": "balanced"}),
        slow({"freeze_core": True, "label_smoothing": 0.1}),
    ],
    ids=lambda options: " ".join(options),
)
def test_few_shot_training_can_be_combined_with_other_options(
    options: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", **options)
    results = read_json(run / "all_results.json")
    assert results["eval_kind"] == "cross-validated"
    scores = finetune.evaluate(run, device="cpu").scores
    assert scores.loss == pytest.approx(results["test_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "labels",
    [lambda n: f"{n / 7:.3f}", lambda n: "a|b" if n % 3 else "c"],
    ids=["regression", "multi-label"],
)
def test_linear_head_fits_regression_and_multi_label(
    labels: Callable[[int], str], train: Train, tmp_path: Path
) -> None:
    for name, rows in (("train", range(60)), ("test", range(60, 80))):
        lines = (f"{THINGS[row % 8]} {row},{labels(row)}" for row in rows)
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    events: list[Event] = []
    run = train(
        tmp_path / "run", data=str(tmp_path / "train.csv"), test_file=str(tmp_path / "test.csv"),
        freeze_core=True, emit=events.append,
    )  # fmt: skip
    assert was_emitted(events, Info, "training method: a linear head is fitted")
    results = read_json(run / "all_results.json")
    assert np.isfinite([results["eval_loss"], results["test_loss"]]).all()


@pytest.mark.parametrize("options", [slow({}), {"train_layers": 1}], ids=["full", "last layer"])
def test_head_also_learns_from_unlabeled_texts(
    options: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    texts = tmp_path / "new.txt"
    texts.write_text(
        "\n".join(f"what is the {thing} of it, number {n}" for thing in THINGS for n in range(9))
    )
    results = read_json(
        train(tmp_path / "run", unlabeled=str(texts), **options) / "all_results.json"
    )
    used = results["details"]["unlabeled"]
    assert used["texts"] == 9 * len(THINGS)
    assert 0 <= used["changed"] <= 1
    assert "Unlabeled texts" in (tmp_path / "run/report.html").read_text()
    table = {"body": texts.read_text().splitlines()}
    again = train(tmp_path / "again", unlabeled=table, **options)
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(again))


def test_run_resumed_after_its_last_step_reports_unlabeled_texts(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_with_ctrl_c(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = {"unlabeled": {"body": [f"what is the {thing} of it?" for thing in THINGS]}}
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", stop_with_ctrl_c)
        with pytest.raises(InterruptionError):
            train(tmp_path / "run", **options)
    events: list[Event] = []
    finetune.run(resume_from_checkpoint=tmp_path / "run", emit=events.append)
    assert was_emitted(events, Info, f"also learned from {len(THINGS)} unlabeled texts")
    details = read_json(tmp_path / "run/all_results.json")["details"]
    assert details["unlabeled"]["texts"] == len(THINGS)
    assert "Unlabeled texts" in (tmp_path / "run/report.html").read_text()


def test_unused_unlabeled_texts_are_reported(train: Train, tmp_path: Path) -> None:
    texts = tmp_path / "new.txt"
    texts.write_text("what is it?\nwhere is it?\n")
    events: list[Event] = []
    train(tmp_path / "run", unlabeled=str(texts), freeze_core=True, emit=events.append)
    assert was_emitted(events, WarningMessage, "unlabeled has no effect")


def test_variant_with_a_frozen_encoder_ignores_class_names(tiny_folder: Path) -> None:
    shared = prepare_tiny(tiny_folder, contrastive="on")
    assert "names" in shared.examples
    options = {"contrastive": "auto", "freeze_core": True, "fit_head": "on"}
    variant = prepare_variant(shared, change_options(shared.config, options))
    assert variant.examples.keys() == variant.data.splits.keys()


DESCRIPTIONS = {name: question.format("a city") for name, question in CLASSES.items()}


@pytest.mark.parametrize(
    "options",
    [{"train_layers": 1}, slow({"long_texts": "windows", "max_length": 8, "stride": 2})],
    ids=lambda options: " ".join(options),
)
def test_class_descriptions_are_training_rows(
    options: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    events: list[Event] = []
    run = train(tmp_path / "run", class_descriptions=DESCRIPTIONS, emit=events.append, **options)
    assert was_emitted(events, Info, "few-shot: class descriptions are training rows")
    results = read_json(run / "all_results.json")
    assert "are training rows" in results["details"]["names"]
    assert results["train_samples"] == 15
    assert set(read_json(run / "model/config.json")["id2label"].values()) == {*CLASSES, "color"}
    other = train(tmp_path / "other", class_names="off", **options)
    assert not have_same_bits(weights_of(run), weights_of(other))


@pytest.mark.parametrize(
    "architecture",
    [
        "bert",
        *map(slow, sorted({one["config"]["model_type"] for one in read_encoders()} - {"bert"})),
    ],
)
def test_each_listed_architecture_uses_mean_pooling_in_few_shot_training(
    architecture: str, train: Train, tmp_path: Path
) -> None:
    source = save_tiny_model(tmp_path / "source", architecture)
    run = train(tmp_path / "run", model=str(source))
    config = RunFolder(run).read_config()
    assert (config.training.contrastive, config.model.pooling) == ("on", "mean")
    texts = [row["text"] for row in read_jsonl(run / "predictions.jsonl")]
    classify = pipeline("text-classification", model=str(run / "model"))
    for answer, expected in zip(finetune.predict(run, texts), classify(texts), strict=True):
        assert answer.label == expected["label"]
        assert answer.probability == pytest.approx(expected["score"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({}, []),
        (
            {
                "effective_batch_size": 8, "early_stopping_patience": 3, "head_lr_multiplier": 2.0,
                "metric_for_best_model": "macro_f1", "empty_labels": "none",
            },
            [
                "--early-stopping-patience has no effect with few-shot training",
                "--effective-batch-size has no effect with few-shot training",
                "--empty-labels has no effect with --task single",
                "--head-lr-multiplier has no effect with few-shot training",
                "--metric-for-best-model has no effect with few-shot training",
            ],
        ),
        (
            {
                "freeze_core": True, "contrastive": "auto", "weight_decay": 0.1, "batch_size": 8,
                "warmup_fraction": 0.2, "max_grad_norm": 2.0, "class_names": "off",
            },
            [
                "--batch-size has no effect when a linear head is fitted",
                "--class-names has no effect without few-shot training",
                "--max-grad-norm has no effect when a linear head is fitted",
                "--warmup-fraction has no effect when a linear head is fitted",
                "--weight-decay has no effect when a linear head is fitted",
            ],
        ),
        (
            {
                "contrastive": "off", "max_steps": 2, "num_train_epochs": 1.0,
                "early_stopping_patience": 3, "validation_fraction": None,
                "save_steps": 5, "time_limit": 60.0,
            },
            [
                "--early-stopping-patience has no effect without validation rows",
                "--num-train-epochs has no effect with --max-steps",
                "--save-steps has no effect with another --save-strategy",
                "--time-limit has no effect without --batch-size auto",
            ],
        ),
    ],
    ids=["default", "few-shot", "fitted head", "gradient descent"],
)  # fmt: skip
def test_options_without_effect_on_the_training_method_are_reported(
    options: dict[str, Any], unread: list[str], tables: dict[str, str], tiny_folder: Path
) -> None:
    events: list[Event] = []
    unset = ("learning_rate", "num_train_epochs", "batch_size", "validation_fraction")
    with sent_to(events.append):
        flags = tables | dict.fromkeys(unset) | {"contrastive": "on"} | options
        prepare_tiny(tiny_folder, **flags)
    messages = [event.message for event in events if isinstance(event, WarningMessage)]
    assert sorted(message for message in messages if "no effect" in message) == unread
