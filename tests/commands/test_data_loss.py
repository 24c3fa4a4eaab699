"""Commands that write to a folder keep the files of other programs in it."""

import shutil
from pathlib import Path

import pytest
from test_ownership import assert_kept, write
from tiny_runs import Command, at, flags, press_ctrl_c, run_tiny, weights_of

import finetune
from finetune.errors import InterruptionError
from finetune.events import Step


def test_overwriting_a_run_keeps_and_lists_user_files(
    command: Command, finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    planted = write(run, "model/n.txt", "previous/n.txt", "checkpoints/n.txt", "notes.md", ".lock")
    arguments = ("run", "--model", tiny_folder, "--output-dir", run, *flags(max_steps=1))
    outcome = command(*arguments, "--overwrite")
    assert outcome.code == 0, outcome.errors
    assert "that no run wrote: .lock, checkpoints/n.txt, model/n.txt" in outcome.errors
    assert_kept(planted)
    assert weights_of(run)
    assert finetune.predict(run, ["Who?"], device="cpu")


def test_resuming_a_run_keeps_user_files_next_to_checkpoints(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(InterruptionError):
        run_tiny(
            run,
            model=tiny_folder,
            save_strategy="steps",
            save_steps=2,
            emit=at(Step, 3, press_ctrl_c),
        )
    names = ("checkpoints/n.txt", "checkpoints/step-2/n.txt", "checkpoints/step-9/n.json")
    planted = write(run, *names, "checkpoints/checkpoint-4/model.safetensors")
    finetune.run(resume_from_checkpoint=run)
    assert_kept(planted)
    left = {path for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert left == planted.keys()
    assert finetune.run(resume_from_checkpoint=run).to_json()  # it has finished


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "model"])
def test_overwrite_is_rejected_if_the_run_reads_from_its_output_folder(
    name: str, command: Command, finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    option = {"metrics.jsonl": "--data", "config.yaml": "--config", "model": "--model"}[name]
    (tmp_path / "link").symlink_to(run)
    for folder in (run, tmp_path / "link"):
        options = {"--model": tiny_folder, "--output-dir": folder, option: run / name}
        words = [str(word) for pair in options.items() for word in pair]
        command("run", *words, "--overwrite").assert_rejected(2, "which --overwrite would delete")
    assert {path: path.read_bytes() for path in before} == before


def test_clearing_the_cache_keeps_user_files(command: Command, tmp_path: Path) -> None:
    features = tmp_path / "cache" / "features"
    names = ("a.json", "b.partial/notes.json", f"{'a' * 64}/notes.json", f"{'b' * 64}/x.txt")
    planted = write(features, *names, f"{'d' * 64}.features/x")
    planted |= write(tmp_path / "cache" / "batches", "orders.json", f"{'a' * 64}.json", "list.json")
    planted |= write(tmp_path / "cache" / "precision", "mine.json")
    link = features / f"{'e' * 64}.features"
    link.symlink_to(features / "a.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "features").symlink_to(features)
    for cache in ("cache", "other"):
        assert command("cache", "clear", "--cache-dir", tmp_path / cache).code == 0
    assert_kept(planted)
    assert link.is_symlink()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_predict_does_not_replace_an_existing_file_without_overwrite(
    suffix: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table, output = tmp_path / f"x.{suffix}.partial", tmp_path / f"x.{suffix}"
    table.write_text("Who wrote Faust?\n")
    predict = ("predict", finished_run, "--lines", "--data", table, "--output")
    assert command(*predict, output).code == 0
    assert table.read_text() == "Who wrote Faust?\n"
    planted = write(tmp_path, f"x.{suffix}")
    command(*predict, output).assert_rejected(2, "already exists", "--overwrite")
    assert_kept(planted)
    assert command(*predict, output, "--overwrite").code == 0
    assert "Who wrote" in output.read_text()
    (tmp_path / f"hard.{suffix}").hardlink_to(table)
    for path in (tmp_path / f"hard.{suffix}", finished_run / "predictions.jsonl"):
        before = path.read_bytes()
        command(*predict, path, "--overwrite").assert_rejected(2, "another")
        assert path.read_bytes() == before
