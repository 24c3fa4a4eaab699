"""Sweeps, their search spaces and trials, and stopping and resuming them."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK, Command, flags

import finetune
from finetune.commands.sweep import choose_trials, read_space
from finetune.errors import ConfigurationError, InterruptionError, NotARunError
from finetune.events import Event, Info
from finetune.files import read_json
from finetune.runs.folder import RunFolder
from finetune.runs.several import SeveralResults
from finetune.training import plan

OPTIONS: dict[str, Any] = QUICK | {"max_train_samples": 48, "num_train_epochs": 4}
SPACE = "training:\n  learning_rate: [1e-3, 1e5, 1e-5, 1e-4]\nmax_length: [16]\n"


def sweep(folder: Path, *, model: Path, space: str = SPACE, **options: Any) -> SeveralResults:
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(space)
    options = OPTIONS | {"learning_rate": None} | options
    return finetune.sweep(file, **options, model=str(model), output_dir=str(folder))


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was stopped in its third trial and resumed in another call."""
    folder = tmp_path_factory.mktemp("sweep") / "four"
    started: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Info) and event.message.startswith("trial "):
            started.append(event.message[:7])
            if started == ["trial 1", "trial 2", "trial 3"]:
                raise KeyboardInterrupt

    with pytest.raises(InterruptionError) as caught:
        sweep(folder, model=tiny_folder, emit=note)
    assert "the same finetune sweep" in caught.value.remedy
    sweep(folder, model=tiny_folder, emit=note)
    # The second trial failed and is not repeated.
    assert started[3:] == ["trial 3", "trial 4"]
    return folder


def test_sweep_reports_the_best_trial_and_continues_after_a_failed_one(folder: Path) -> None:
    content = read_json(folder / "sweep.json")
    trials = content["trials"]
    assert [one["options"]["learning_rate"] for one in trials.values()] == [1e-3, 1e5, 1e-5, 1e-4]
    assert {one["options"]["max_length"] for one in trials.values()} == {16}
    assert [bool(one["failure"]) for one in trials.values()] == [False, True, False, False]
    values = [one["value"] for one in trials.values() if one["value"] is not None]
    assert trials[content["best"]]["value"] == max(values)
    assert len(values) == 3
    run = folder / content["best"]
    assert (folder / "best.yaml").read_text() == (run / "config.yaml").read_text()


def test_finished_sweep_is_reused_and_a_different_one_is_rejected(
    folder: Path, tiny_folder: Path
) -> None:
    content = read_json(folder / "sweep.json")
    again = sweep(folder, model=tiny_folder)
    assert again.to_json().items() <= content.items()
    assert again.records()[0]["trial"] == again.best
    for options in ({"space": "learning_rate: [1, 2]"}, {"calibrate": False}):
        with pytest.raises(ConfigurationError, match="started with a different"):
            sweep(folder, model=tiny_folder, **options)
    with pytest.raises(NotARunError, match="no model"):
        finetune.predict(folder, ["who"])


def test_sweep_without_a_successful_trial_reports_the_failure(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="all trials failed: the loss is nan"):
        sweep(tmp_path / "sweep", model=tiny_folder, space="learning_rate: [1e5]")


def test_best_config_reproduces_the_best_trial(folder: Path, tmp_path: Path) -> None:
    results = finetune.run(config=folder / "best.yaml", output_dir=str(tmp_path / "run"))
    content = read_json(folder / "sweep.json")
    assert results.validation
    best = content["trials"][content["best"]]
    assert results.validation.metrics[content["metric"]] == pytest.approx(best["value"])


def test_trials_form_a_grid_or_a_reproducible_random_sample(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    lines = ["learning_rate: {low: 1e-5, high: 1e-2, log: true}", "batch_size: {low: 8, high: 64}"]
    file.write_text("\n".join([*lines, "model:", "  train_layers: [1, null]"]))
    space = read_space(file)
    assert space["batch_size"] == {"low": 8, "high": 64, "log": False}
    drawn = choose_trials(space, trials=50, seed=1)
    assert drawn == choose_trials(space, trials=50, seed=1)
    assert all(8 <= one["batch_size"] <= 64 for one in drawn)
    assert {type(one["batch_size"]) for one in drawn} == {int}
    assert 15 <= sum(one["learning_rate"] < 3.2e-4 for one in drawn) <= 35
    assert {one["train_layers"] for one in drawn} == {1, None}
    below_one = {"lora_dropout": {"low": 0.9991, "high": 0.9999, "log": False}}
    values = [trial["lora_dropout"] for trial in choose_trials(below_one, trials=50, seed=1)]
    assert all(0.9991 <= value <= 0.9999 for value in values)
    with pytest.raises(ConfigurationError, match="a grid needs lists"):
        choose_trials(space, trials=None, seed=1)
    grid = {"seed": [1, 2, 3], "calibrate": [True, False]}
    assert len(choose_trials(grid, trials=None, seed=1)) == 6
    some = choose_trials(grid, trials=4, seed=1)
    assert len({(one["seed"], one["calibrate"]) for one in some}) == 4


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("", "has no options"),
        ("learning_rat: [1]", "unknown option learning_rat"),
        ("data:\n  test_fraction: [0.1]", "test_fraction can't vary in a sweep"),
        ("eval_batch_size: [8, 16]", "eval_batch_size can't vary in a sweep"),
        ("learning_rate: {low: 2, high: 1}", "neither a list nor low and high"),
        ("learning_rate: [fast]", "learning_rate is 'fast'"),
        ("train_layers: [1]\nfreeze_core: [true]", "can't be combined"),
    ],
)
def test_invalid_search_space_is_rejected_before_files_are_written(
    space: str, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        sweep(tmp_path / "sweep", model=tiny_folder, space=space)
    assert not (tmp_path / "sweep").exists()


def test_command_prints_the_trials_and_the_best_config(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("fit_head: ['on']\nclass_weights: [none, balanced]")
    options = flags(max_train_samples=48, max_length=8)
    folder = tmp_path / "sweep"
    outcome = command(
        "sweep", space, "--model", tiny_folder, "--freeze-core", "--output-dir", folder, *options
    )
    assert outcome.code == 0, outcome.errors
    assert "trial-1" in outcome.output
    assert f"finetune run {folder}/best.yaml" in outcome.output


@pytest.mark.parametrize(
    ("space", "options", "words"),
    [
        ("weight_decay: [0, 0.1]", {"freeze_core": True}, "when a linear head is fitted"),
        ("batch_size: [8, 16]", {"freeze_core": True}, "when a linear head is fitted"),
        ("head_lr_multiplier: [1, 5]", {"contrastive": "on"}, "with few-shot training"),
        ("num_train_epochs: [1, 2]", {"max_steps": 2}, "with max_steps"),
        ("class_names: [auto, 'off']", {"contrastive": "off"}, "class_names can't vary"),
    ],
)
def test_sweep_over_an_option_without_effect_is_rejected(
    space: str, options: dict[str, Any], words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    options = {"num_train_epochs": None} | options
    with pytest.raises(ConfigurationError, match=words):
        sweep(tmp_path / "sweep", model=tiny_folder, space=space, **options)
    assert not (tmp_path / "sweep").exists()


def test_batch_sizes_of_few_shot_trials_differ(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MIN_STEPS", 2)
    options = {"num_train_epochs": None, "contrastive": "on"}
    sweep(tmp_path / "sweep", model=tiny_folder, space="batch_size: [8, 16]", **options)
    runs = [RunFolder(tmp_path / "sweep" / f"trial-{number}") for number in (1, 2)]
    assert [run.read_config().training.batch_size for run in runs] == [8, 16]
