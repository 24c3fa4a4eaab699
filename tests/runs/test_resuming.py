"""Stopped and killed runs resume with identical results."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    QUICK,
    at,
    have_same_bits,
    logged_metrics,
    press_ctrl_c,
    run_tiny,
    unfinished_files,
    weights_of,
)

import finetune
from finetune.errors import ConfigurationError, InterruptionError, NotARunError, UsageError
from finetune.events import Emit, Event, Info, Stage, Step, WarningMessage
from finetune.files import read_json
from finetune.runs.checkpoint import read_checkpoint, write_checkpoint
from finetune.runs.folder import RunFolder


def press_twice() -> None:
    press_ctrl_c()
    press_ctrl_c()


SHORT: dict[str, Any] = {"max_train_samples": 32, "seed": 5}
"""Two epochs of two steps, of which the second has the best model."""


def stop_run(folder: Path, *, after_step: int, model: Path, **options: Any) -> None:
    """Start a run, and press Ctrl-C when a step is reported."""
    with pytest.raises(InterruptionError):
        run_tiny(folder, model=model, emit=at(Step, after_step, press_ctrl_c), **options)


def files_of(run: Path) -> set[Path]:
    return {path.relative_to(run) for path in run.rglob("*") if path.is_file()}


def assert_same_run(run: Path, other: Path) -> None:
    """Compare everything that doesn't depend on time."""
    assert files_of(run) == files_of(other)
    assert have_same_bits(weights_of(run), weights_of(other))
    assert logged_metrics(run) == logged_metrics(other)
    for name in ("config.yaml", "predictions.jsonl"):
        assert (run / name).read_bytes() == (other / name).read_bytes()
    results, expected = (read_json(path / "all_results.json") for path in (run, other))
    for name in ("epoch", "best_global_step", "eval_loss", "test_accuracy", "test_loss"):
        assert results.get(name) == expected.get(name)
    assert results["train_loss"] == pytest.approx(expected["train_loss"])
    assert unfinished_files(run) == []


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run of four steps without interruption. Tests don't change it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_tiny(folder, model=tiny_folder, **SHORT)
    return folder


@pytest.fixture(scope="module")
def kept_stopped_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The same run, stopped after its third step. Tests don't change it."""
    run = tmp_path_factory.mktemp("runs") / "stopped"
    stop_run(run, after_step=3, model=tiny_folder, **SHORT)
    return run


@pytest.fixture
def stopped_run(kept_stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run that tests can change."""
    return shutil.copytree(kept_stopped_run, tmp_path / "stopped")


@pytest.mark.parametrize(
    ("emit", "kept"),
    [
        (at(Step, 2, press_ctrl_c), {2}),
        (at(Step, 3, press_twice), {2}),
        pytest.param(at(Stage, "test", press_ctrl_c), {2, 4}, marks=pytest.mark.slow),
        (at(Stage, "report", press_ctrl_c), {2, 4}),
    ],
    ids=["after an epoch", "immediately", "during evaluation", "before the report"],
)
def test_stopped_run_suggests_a_command_that_resumes_bit_identically(
    emit: Emit, kept: set[int], whole_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "my runs" / "it's one"
    with pytest.raises(InterruptionError) as stopped:
        run_tiny(run, model=tiny_folder, emit=emit, **SHORT)
    command = stopped.value.remedy.removeprefix("resume with: ")
    assert shlex.split(command) == ["finetune", "run", "--resume-from-checkpoint", str(run)]
    found = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert found == {f"step-{step}" for step in kept}
    finetune.run(resume_from_checkpoint=run)
    assert_same_run(run, whole_run)


@pytest.mark.parametrize(
    ("strategy", "emit", "kept"),
    [("no", at(Step, 3, press_ctrl_c), 3), ("time", at(Stage, "test", press_ctrl_c), 4)],
)
def test_run_without_checkpoints_writes_one_when_stopped(
    strategy: str, emit: Emit, kept: int, whole_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(InterruptionError, match="stopped"):
        run_tiny(run, model=tiny_folder, emit=emit, **SHORT, save_strategy=strategy)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{kept}"]
    finetune.run(resume_from_checkpoint=run, save_strategy="epoch")
    assert have_same_bits(weights_of(run), weights_of(whole_run))


def test_run_can_resume_with_save_steps(stopped_run: Path, whole_run: Path) -> None:
    emitted: list[Event] = []
    finetune.run(resume_from_checkpoint=stopped_run, save_steps=1, emit=emitted.append)
    messages = [event.message for event in emitted if isinstance(event, WarningMessage)]
    assert not any("--save-steps has no effect" in message for message in messages)
    assert have_same_bits(weights_of(stopped_run), weights_of(whole_run))


def test_stopped_run_is_not_calibrated_twice(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [f"text {row} {row % 7},{1000 + row % 7}" for row in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    options: dict[str, Any] = {"data": str(tmp_path / "rows.csv"), "task": "regression"}
    options["num_train_epochs"] = 1
    stop = at(Stage, "report", press_ctrl_c)
    run_tiny(tmp_path / "whole", model=tiny_folder, **options)
    with pytest.raises(InterruptionError):
        run_tiny(tmp_path / "run", model=tiny_folder, emit=stop, **options)
    finetune.run(resume_from_checkpoint=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_lora_checkpoint_contains_trained_weights_and_resumes_identically(
    tmp_path: Path, tiny_folder: Path
) -> None:
    options = {**SHORT, "lora_rank": 4, "lora_dropout": 0.1, "contrastive": "off"}
    run_tiny(tmp_path / "whole", model=tiny_folder, **options)
    stop_run(tmp_path / "run", after_step=3, model=tiny_folder, **options)
    [newest, *_] = RunFolder(tmp_path / "run").checkpoints
    names = read_checkpoint(newest)[0]["model"]
    assert all(".lora_" in name or "classifier." in name for name in names)
    finetune.run(resume_from_checkpoint=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"model": "minilm"},
        {"freeze_core": True},
        {"lora_rank": 8},
        {"num_train_epochs": 5},
        {"assignments": ["training.seed=7"]},
    ],
)
def test_resuming_rejects_changes_to_training_options(
    changes: dict[str, Any], kept_stopped_run: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in kept_stopped_run.rglob("*")}
    with pytest.raises(ConfigurationError, match="can't change when a run resumes") as raised:
        finetune.run(resume_from_checkpoint=kept_stopped_run, **changes)
    assert raised.value.exit_code == 2
    assert {path: path.stat().st_mtime_ns for path in kept_stopped_run.rglob("*")} == before


def test_run_without_a_checkpoint_is_rejected(stopped_run: Path) -> None:
    shutil.rmtree(stopped_run / "checkpoints")
    with pytest.raises(UsageError, match="no checkpoint") as raised:
        finetune.run(resume_from_checkpoint=stopped_run)
    assert "overwrite" in raised.value.remedy


def test_resuming_a_finished_run_returns_its_results_unchanged(
    finished_run: Path, tmp_path: Path
) -> None:
    # A run in a folder with this name is not a checkpoint.
    run = shutil.copytree(finished_run, tmp_path / "checkpoints" / "run")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    results = finetune.run(resume_from_checkpoint=run)
    written = json.loads(json.dumps(results.to_json()))
    assert written == read_json(run / "all_results.json")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (run / "all_results.json").write_text("{}")
    with pytest.raises(UsageError, match="all_results"):
        finetune.run(resume_from_checkpoint=run)


@pytest.mark.parametrize("changes", [{"num_train_epochs": 3}, {"max_steps": 9}, {"seed": 7}])
def test_finished_run_suggests_further_training_from_its_model(
    changes: dict[str, Any], whole_run: Path
) -> None:
    with pytest.raises(ConfigurationError, match="can't change when a run resumes") as raised:
        finetune.run(resume_from_checkpoint=whole_run, **changes)
    command = f"finetune run {whole_run} --model {whole_run / 'model'}"
    assert raised.value.remedy.endswith(f"train its model further: {command}")


@pytest.mark.parametrize(
    "mode",
    [
        {"lora_rank": 4, "train_layers": 1},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"lora_rank": 4},
                {"lora_rank": 4, "pooling": "mean"},
                {},
                {"pooling": "mean"},
                {"train_layers": 1},
                {"freeze_core": True},
                {"head": "classifier"},
            )
        ),
    ],
    ids=str,
)
def test_model_of_a_run_can_be_trained_further_in_each_mode(
    mode: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = finetune.run(**QUICK | SHORT | mode, model=str(tiny_folder), output_dir=run)
    # At this learning rate, the weights don't change.
    results = finetune.run(
        run, model=run / "model", learning_rate=1e-12, num_train_epochs=1, output_dir=tmp_path / "2"
    )
    assert (results.facts.mode, results.training.epoch) == (first.facts.mode, 1.0)
    before, after = weights_of(run), weights_of(tmp_path / "2")
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_auto_starts_or_resumes_a_run_and_keeps_a_finished_run(
    whole_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run, emitted = tmp_path / "run", list[Event]()
    options: dict[str, Any] = SHORT | {"resume_from_checkpoint": "auto", "model": tiny_folder}
    stop_run(run, after_step=3, **options)
    run_tiny(run, **options, emit=emitted.append)
    assert_same_run(run, whole_run)
    assert any(isinstance(event, Info) and "after step 3" in event.message for event in emitted)
    run_tiny(run, **options)
    assert_same_run(run, whole_run)
    with pytest.raises(ConfigurationError, match="seed is 7, but was 5"):
        run_tiny(run, **(options | {"seed": 7}))


def test_auto_without_a_folder_resumes_the_newest_run_with_that_name(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = QUICK | SHORT | {"model": str(tiny_folder)}
    finetune.run(**options | {"max_steps": 1})
    with pytest.raises(InterruptionError):
        finetune.run(**options, emit=at(Step, 3, press_ctrl_c))
    results = finetune.run(**options, resume_from_checkpoint="auto")
    assert results.output_dir == "runs/questions-tiny-full-2"


@pytest.mark.parametrize(
    "damage",
    [
        "optimizer.safetensors",
        pytest.param("manifest.json", marks=pytest.mark.slow),
        {"progress": {"steps": 3, "seconds": "many"}, "gradient_scaler": {}},
    ],
    ids=str,
)
def test_damaged_checkpoint_is_skipped_for_an_earlier_one(
    damage: str | dict[str, Any], whole_run: Path, stopped_run: Path
) -> None:
    newest = stopped_run / "checkpoints" / "step-3"
    if isinstance(damage, str):
        (newest / damage).write_text("[]")
    else:  # a complete checkpoint
        write_checkpoint(newest, tensors=read_checkpoint(newest)[0], state=damage)
    emitted: list[Event] = []
    finetune.run(resume_from_checkpoint=stopped_run, emit=emitted.append)
    [warning] = [event.message for event in emitted if isinstance(event, WarningMessage)
                 and "checkpoint" in event.message]  # fmt: skip
    assert f"{newest} is damaged" in warning
    assert_same_run(stopped_run, whole_run)


def test_edited_config_is_rejected_with_all_changes(stopped_run: Path) -> None:
    config = stopped_run / "config.yaml"
    text = config.read_text()
    edited = text.replace("  seed: 5\n", "  seed: 6\n").replace(
        "num_train_epochs: 2.0", "num_train_epochs: 9"
    )
    # This option can be changed.
    config.write_text(edited.replace("  batch_size: 16", "  batch_size: 8"))
    with pytest.raises(ConfigurationError) as raised:
        finetune.run(resume_from_checkpoint=stopped_run)
    assert "num_train_epochs is 9.0, but was 2.0; " in raised.value.message
    assert "seed is 6, but was 5" in raised.value.message
    assert " batch_size" not in raised.value.message


def test_stopped_run_without_a_manifest_is_rejected(stopped_run: Path) -> None:
    (stopped_run / "manifest.json").unlink()
    with pytest.raises(NotARunError, match=r"manifest\.json"):
        finetune.run(resume_from_checkpoint=stopped_run)
