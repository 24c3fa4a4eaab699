"""Cross-validation, in which each row is predicted by a model that wasn't trained on it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK, Command, flags

import finetune
from finetune.errors import (
    ConfigurationError,
    DataError,
    InterruptionError,
    NotARunError,
    UsageError,
)
from finetune.events import Event, Info
from finetune.files import read_json, read_jsonl, write_json
from finetune.runs.folder import SeveralFolder
from finetune.runs.several import SeveralResults, read_out_of_fold
from finetune.tasks.scores import Scores

ROWS = [f"{text} {number},{'even' if number % 2 else 'odd'}"
        for number, text in enumerate(["where is it", "who is it", "what is it"] * 4)]  # fmt: skip


def run_folds(folder: Path, *, model: Path, folds: int = 3, **options: Any) -> SeveralResults:
    quick = QUICK | {"max_train_samples": None, "num_train_epochs": 1, "validation_fraction": None}
    return finetune.run(**(quick | options), folds=folds, model=str(model), output_dir=str(folder))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows, followed by two rows with the text of the first."""
    path = tmp_path_factory.mktemp("data") / "table.csv"
    path.write_text("\n".join(["text,label", *ROWS, ROWS[0], ROWS[0].replace("odd", "even")]))
    return path


@pytest.fixture(scope="module")
def folds(tiny_folder: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation whose last two folds were trained after an interruption."""
    folder = tmp_path_factory.mktemp("folds") / "three"

    def stop_at_the_second(event: Event) -> None:
        if isinstance(event, Info) and event.message.startswith("fold 2"):
            raise KeyboardInterrupt

    with pytest.raises(InterruptionError, match="1 of 3 folds have finished") as caught:
        run_folds(folder, model=tiny_folder, data=str(table), emit=stop_at_the_second)
    assert f"--folds 3 --resume-from-checkpoint {folder}" in caught.value.remedy
    events: list[Event] = []
    finetune.run(folds=3, resume_from_checkpoint=str(folder), emit=events.append)
    started = [
        one.message for one in events if isinstance(one, Info) and one.message[:5] == "fold "
    ]
    assert started == ["fold 2, 2 of 3", "fold 3, 3 of 3"]
    return folder


def test_fold_without_validation_rows_does_not_stop_early(folds: Path) -> None:
    config = SeveralFolder(folds, "folds").run(1).read_config()
    assert config.training.early_stopping_patience == 0


def test_each_row_is_predicted_once_by_a_model_trained_without_its_text(folds: Path) -> None:
    rows = read_jsonl(folds / "predictions.jsonl")
    assert [row["row"] for row in rows] == [*range(2, 16)]
    assert [f"{row['text']},{row['label']}" for row in rows[:12]] == ROWS
    assert rows[0]["fold"] == rows[12]["fold"] == rows[13]["fold"]
    # The texts are three sentences with different numbers.
    assert all(row["near_duplicate"] for row in rows)
    assert read_json(folds / "folds.json")["test"]["distinct"] == {"samples": 0}
    assert sorted({row["fold"] for row in rows}) == [1, 2, 3]
    content = read_json(folds / "folds.json")
    interval, scores = content["intervals"]["accuracy"], Scores.from_json(content["test"])
    assert (interval["low"], interval["high"]) == pytest.approx(scores.limits("accuracy"))
    for fold in (1, 2, 3):
        content = read_json(folds / f"fold-{fold}" / "all_results.json")
        own = [row for row in rows if row["fold"] == fold]
        assert (content["test_samples"], content["train_samples"]) == (len(own), 14 - len(own))


def test_folds_killed_at_the_end_are_completed(folds: Path, tmp_path: Path) -> None:
    late = shutil.copytree(folds, tmp_path / "late")
    for name in ("predictions.jsonl", "report.html", "SHA256SUMS"):
        (late / name).unlink()
    content = read_json(folds / "folds.json")
    write_json(late / "folds.json", content | {"test": None, "intervals": {}})
    assert not SeveralFolder(late, "folds").has_finished
    finetune.run(folds=3, resume_from_checkpoint=str(late))
    assert read_json(late / "folds.json") == content
    assert read_jsonl(late / "predictions.jsonl") == read_jsonl(folds / "predictions.jsonl")
    assert (late / "report.html").exists()


def test_fold_models_are_kept_only_with_keep_models(
    folds: Path, tiny_folder: Path, table: Path, tmp_path: Path
) -> None:
    assert not (folds / "fold-1" / "model" / "model.safetensors").exists()
    with pytest.raises(NotARunError, match="has no model") as caught:
        finetune.predict(folds / "fold-1", ["who"])
    assert "--keep-models" in caught.value.remedy
    with pytest.raises(NotARunError, match="no model of its own"):
        finetune.predict(folds, ["who"])
    run_folds(tmp_path / "kept", model=tiny_folder, folds=2, data=str(table), keep_models=True)
    assert (tmp_path / "kept" / "fold-2" / "report.html").is_file()
    finetune.predict(tmp_path / "kept" / "fold-2", ["who"], device="cpu")


@pytest.mark.parametrize(
    ("task", "labels"),
    [("multi", ["a|b", "b", "a", "a|c"]), ("regression", ["1.5", "2", "-3", "8"])],
)
def test_multi_label_and_regression_pairs_can_be_cross_validated(
    task: str, labels: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    lines = [f"row {number},other {number},{label}" for number, label in enumerate(labels * 3)]
    (tmp_path / "table.csv").write_text("\n".join(["text,text_pair,label", *lines]))
    data = {"data": str(tmp_path / "table.csv"), "task": task}
    results = run_folds(tmp_path / "folds", model=tiny_folder, folds=2, **data)
    _, _, outputs = read_out_of_fold(tmp_path / "folds")
    assert (outputs.probabilities is None) == (task == "regression")
    assert results.scores
    assert results.scores.samples == 12
    assert read_jsonl(tmp_path / "folds" / "predictions.jsonl")[3]["text_pair"] == "other 3"


def test_invalid_combinations_are_rejected(
    folds: Path, tiny_folder: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="has 3 folds, which can't become 4"):
        finetune.run(folds=4, resume_from_checkpoint=str(folds))
    with pytest.raises(UsageError, match="folds of a cross-validation") as caught:
        finetune.run(resume_from_checkpoint=str(folds))
    assert "folds 3" in caught.value.remedy
    with pytest.raises(DataError, match="12 different texts are too few for 13 folds"):
        run_folds(tmp_path / "new", model=tiny_folder, folds=13, data=str(table))
    for options in ({"seeds": 2, "folds": 2}, {"folds": 1}, {"keep_models": True}):
        with pytest.raises(UsageError):
            finetune.run(**options)
    assert not (tmp_path / "new").exists()


def test_command_reports_folds_and_ignores_test_rows(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folds"
    options = flags(max_train_samples=24, num_train_epochs=1, max_length=8)
    outcome = command("run", "--folds", 2, "--model", tiny_folder, "--output-dir", folder, *options)
    assert outcome.code == 0, outcome.errors
    assert "questions, 810 rows, each predicted by a model that did not see it" in outcome.output
    assert "95% over 810 rows" in outcome.output
    assert "the 270 rows of the test split are not used" in outcome.errors
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "810 rows predicted out of fold" in page
    assert "Each row is a true class" in page
    sentences = ("% on 810 rows, each by a model that did not see it (95% CI", "Weakest class:")
    for sentence in sentences:
        assert sentence in " ".join(outcome.output.split())
        assert sentence in page
    assert SeveralFolder(folder, "folds").has_finished
