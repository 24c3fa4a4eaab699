"""Runs with several seeds of one configuration."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK, TEXTS, Command, flags, have_same_bits, weights_of

import finetune
from finetune.errors import FinetuneError, InterruptionError, NotARunError
from finetune.events import Event, Info
from finetune.files import read_json, write_json
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.journal import read_warnings
from finetune.runs.several import SeveralResults


def run_seeds(
    folder: Path | None, *, model: Path, seeds: int = 2, **options: Any
) -> SeveralResults:
    options = QUICK | {"output_dir": folder and str(folder), "model": str(model)} | options
    return finetune.run(seeds=seeds, **options)


@pytest.fixture(scope="module")
def parent(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two seeds, the second of which was trained after an interruption."""
    folder = tmp_path_factory.mktemp("seeds") / "both"

    def stop_at_the_second(event: Event) -> None:
        if isinstance(event, Info) and event.message.startswith("seed 43"):
            raise KeyboardInterrupt

    with pytest.raises(InterruptionError, match="1 of 2 seeds have finished") as caught:
        run_seeds(folder, model=tiny_folder, emit=stop_at_the_second)
    assert f"--seeds 2 --resume-from-checkpoint {folder}" in caught.value.remedy
    assert read_json(folder / "seeds.json")["best"] == "seed-42"
    events: list[Event] = []
    finetune.run(seeds=2, resume_from_checkpoint=str(folder), emit=events.append)
    started = [
        one.message for one in events if isinstance(one, Info) and one.message[:5] == "seed "
    ]
    assert started == ["seed 43, 2 of 2"]
    return folder


def test_each_seed_equals_a_run_with_only_that_seed(parent: Path, finished_run: Path) -> None:
    first, second = parent / "seed-42", parent / "seed-43"
    assert have_same_bits(weights_of(first), weights_of(finished_run))
    assert not have_same_bits(weights_of(second), weights_of(finished_run))
    assert {one.name for one in second.iterdir()} == {one.name for one in finished_run.iterdir()}
    splits = [read_json(run / "manifest.json")["splits"] for run in (first, second)]
    assert splits[0] == splits[1]


def test_finished_seeds_are_averaged_without_retraining(parent: Path, tiny_folder: Path) -> None:
    results = run_seeds(parent, model=tiny_folder, resume_from_checkpoint="auto")
    found = [read_json(parent / f"seed-{n}" / "all_results.json") for n in (42, 43)]
    accuracies = [one["test_accuracy"] for one in found]
    assert results.test["accuracy"].value == pytest.approx(sum(accuracies) / 2)
    # The t quantile for one degree of freedom is 12.7062, the standard error half the difference.
    width = 12.7062 * abs(accuracies[1] - accuracies[0])
    interval = results.test["accuracy"]
    assert interval.high - interval.low == pytest.approx(width, rel=1e-4, abs=1e-12)
    best = max((42, 43), key=lambda n: found[n - 42]["eval_accuracy"])
    assert results.best == best
    assert results.to_json().items() <= read_json(parent / "seeds.json").items()


def test_folder_of_several_seeds_predicts_with_the_best(parent: Path, tmp_path: Path) -> None:
    best = parent / read_json(parent / "seeds.json")["best"]
    assert finetune.predict(parent, TEXTS, device="cpu") == finetune.predict(
        best, TEXTS, device="cpu"
    )
    write_json(SeveralFolder(tmp_path, "seeds").table_file, {"seeds": [1, 2], "best": None})
    with pytest.raises(NotARunError, match="no model of its own") as caught:
        finetune.predict(tmp_path, TEXTS)
    assert f"{tmp_path}/seed-1" in caught.value.remedy


def test_resuming_auto_adds_a_seed_to_the_finished_seeds(
    parent: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / f"questions-{tiny_folder.name}-full-seeds"
    shutil.copytree(parent, folder)
    results = run_seeds(None, model=tiny_folder, seeds=3, resume_from_checkpoint="auto")
    assert [*results.runs] == [42, 43, 44]
    names = {"SHA256SUMS", "manifest.json", "seed-42", "seed-43", "seed-44", "seeds.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert have_same_bits(weights_of(folder / "seed-42"), weights_of(parent / "seed-42"))
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]


def test_linear_head_is_fitted_once_for_several_seeds(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    words = ["questions", "--model", tiny_folder, "--output-dir", tmp_path / "head"]
    options = [*words, "--device", "cpu", "--freeze-core", "--seeds", "3"]
    options += ["--max-train-samples", "64", "--validation-fraction", "0.1"]
    for more in ([], ["--resume-from-checkpoint", "auto"]):
        outcome = command("run", *options, *more)
        assert outcome.code == 0, outcome.errors
        assert "training only one seed" in outcome.errors or more
        assert "seed-42" in outcome.output
        assert read_json(tmp_path / "head" / "seeds.json")["seeds"] == [42]
    finetune.predict(tmp_path / "head", TEXTS)


def test_deleted_first_seed_is_trained_again(parent: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(parent, tmp_path / "seeds")
    shutil.rmtree(folder / "seed-42")
    assert SeveralFolder(folder, "seeds").read_config().training.seed == 42


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("new", {"seeds": 1}, "but should be"),
        ("parent", {}, "already contains runs of several seeds"),
        ("single", {}, "already contains a single run"),
        ("single", {"overwrite": True}, "already contains a single run"),
        ("single", {"resume_from_checkpoint": "single"}, "has no runs of several seeds"),
        ("new", {"seeds": None, "resume_from_checkpoint": "parent"}, "contains runs of several"),
    ],
)
def test_invalid_combinations_are_rejected_and_keep_existing_runs(
    folder: str, options: dict[str, Any], words: str, parent: Path, finished_run: Path,
    tiny_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    folders = {"new": tmp_path / "new", "parent": parent, "single": finished_run}
    if source := options.get("resume_from_checkpoint"):
        options = options | {"resume_from_checkpoint": str(folders[source])}
    with pytest.raises(FinetuneError, match=words) as caught:
        run_seeds(folders[folder], model=tiny_folder, **options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "new").exists()
    assert (finished_run / "all_results.json").is_file()


def test_command_prints_each_seed_and_overwrites_only_earlier_seeds(
    command: Command, parent: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(parent, folder)
    shutil.copytree(folder / "seed-42", folder / "mine")
    options = flags(max_train_samples=16, num_train_epochs=1, max_length=8)
    arguments = ["run", "--seeds", 2, "--model", tiny_folder, "--output-dir", folder, *options]
    command(*arguments, "--dry-run").assert_rejected(2, "--dry-run")
    outcome = command(*arguments, "--overwrite")
    assert outcome.code == 0, outcome.errors
    lines = [line.split() for line in outcome.output.splitlines()]
    starts = [line[0] for line in lines if line]
    assert starts[:7] == ["test", "seed", "seed-42", "seed-43", "mean", "95%", "95%"]
    assert "95% over 2 seeds" in outcome.output
    assert "95% over 270 rows" in outcome.output
    assert f"run folders: {folder}" in outcome.output
    names = ["SHA256SUMS", "manifest.json", "mine", "seed-42", "seed-43", "seeds.json"]
    assert sorted(one.name for one in folder.iterdir()) == names
    assert "keeping files in" in outcome.errors
    # The texts are prepared once, and the report of each seed includes the warnings about them.
    warnings = [read_warnings(RunFolder(folder / name)) for name in ("seed-42", "seed-43")]
    assert warnings[0] == warnings[1]
    assert any("truncated" in one.message for one in warnings[0])
    config = (folder / "seed-42" / "config.yaml").read_text(encoding="utf-8")
    assert "max_train_samples: 16" in config
