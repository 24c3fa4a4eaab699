"""Commands delete and replace only files that finetune wrote."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import UsageError
from finetune.events import Event, Info, sent_to
from finetune.files import temporary_path, write_json
from finetune.ownership import NAMES, OwnFolder, check_output_file
from finetune.runs.folder import RunFolder, SeveralFolder

NOTES = [
    *("notes.txt", ".lock", "config.yaml.bak", "model/notes.txt", "model/vocab.csv"),
    *(
        "checkpoints/step-2/notes.txt",
        "checkpoints/checkpoint-500/model.safetensors",
        "onnx/notes.txt",
        "previous/a",
    ),
    *("tensorboard/notes.txt", "seed-42/config.yaml", "adapter/mine/config.json", "x.csv.partial"),
]


def write(folder: Path, *names: str) -> dict[Path, str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return {folder / name: name for name in names}


def assert_kept(files: dict[Path, str]) -> None:
    assert {path: path.read_text() for path in files} == files


def all_names(kind: str) -> list[str]:
    text = "\n".join(NAMES[kind])
    for pattern, example in (("**/", ""), ("[0-9]*", "4"), ("[0-9a-f]", "a"), ("*", "1")):
        text = text.replace(pattern, example)
    return text.split("\n")


def make_run(path: Path) -> RunFolder:
    """Write a file with each name that a run uses, and leftovers of a killed process."""
    with RunFolder(path).make(overwrite=False) as run:
        write(path, *all_names("run"))
        for file in (run.results_file, run.manifest_file, run.card_file):
            temporary_path(file).touch()
        write(run.model_folder, f".{'0' * 32}.partial/config.json")
    return run


def overwrite(run: RunFolder) -> list[str]:
    """Start a new run in a folder, and return its messages."""
    events: list[Event] = []
    with run.make(overwrite=True), sent_to(events.append):
        run.start()
    said = [event.message for event in events if isinstance(event, Info)]
    return said


def test_overwriting_a_run_deletes_only_its_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    notes = write(run.path, *NOTES)
    [said] = overwrite(run)
    assert f"keeping files in {run.path} that no run wrote: .lock, adapter/mine/config.json" in said
    assert_kept(notes)
    assert {path for path in run.path.rglob("*") if path.is_file()} == {*notes, run.manifest_file}


def test_overwriting_a_run_without_other_files_empties_the_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    OwnFolder(run.onnx_folder, "onnx").write_all(dict.fromkeys(all_names("onnx"), "ours"))
    assert overwrite(run) == []
    assert not [*run.path.iterdir()]


def test_overwriting_seeds_deletes_only_their_runs(tmp_path: Path) -> None:
    seeds = SeveralFolder(tmp_path / "several", "seeds")
    with seeds.make(overwrite=False):
        write_json(seeds.table_file, {"seeds": [1, 2, 3], "best": None})
        make_run(seeds.run(1).path)
        make_run(seeds.run(2).path)
        notes = write(seeds.path, "seed-2/notes.txt", "seed-3/model/config.json")
        make_run(seeds.run(4).path)  # from a different program
    overwrite(seeds)
    assert not seeds.run(1).path.exists()
    assert_kept(notes)
    assert len(seeds.run(4).files()) > len(NAMES["run"])


@pytest.mark.parametrize(
    "act",
    [
        lambda path: overwrite(RunFolder(path)),
        lambda path: overwrite(SeveralFolder(path, "seeds")),
        *(lambda path, kind=kind: OwnFolder(path, kind).write_all({}) for kind in NAMES),
    ],
)
@pytest.mark.parametrize(
    "manifest", [None, "{}", "[]", "3", '{"tool": "finetune", "kind": "other"}', '{"tool": "mine"}']
)
def test_foreign_folder_is_rejected(
    act: Callable[[Path], object], manifest: str | None, tmp_path: Path
) -> None:
    files = write(tmp_path, "config.yaml", "model/config.json", "bench.json")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
        files[tmp_path / "manifest.json"] = manifest
    with pytest.raises(UsageError, match="finetune did not write"):
        act(tmp_path)
    assert_kept(files)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files.keys()


@pytest.mark.parametrize("name", ["model", "checkpoints", "report.html", "model/config.json"])
def test_links_are_not_followed_when_files_are_deleted_or_written(
    name: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    os.rename(run.path / name, tmp_path / "elsewhere" / Path(name).name)
    (run.path / name).symlink_to(tmp_path / "elsewhere" / Path(name).name)
    before = {path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="blocks a file"):
        overwrite(run)
    run.empty()
    assert (run.path / name).is_symlink()
    assert {path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()} == before


def test_link_to_a_run_folder_is_followed(tmp_path: Path) -> None:
    make_run(tmp_path / "disk" / "run")
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    overwrite(RunFolder(tmp_path / "run"))
    assert not [path for path in (tmp_path / "disk" / "run").rglob("*") if path.is_file()]


def test_output_file_cannot_be_a_file_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for file in (run.predictions_file, run.manifest_file, run.model_folder / "model.safetensors"):
        with pytest.raises(UsageError, match="is a file of"):
            check_output_file(file, overwrite=True)
    write_json(run.path / "mine.json", {})
    check_output_file(run.path / "mine.json", overwrite=True)
    for overwrites in (False, None):
        with pytest.raises(UsageError, match="already exists"):
            check_output_file(run.path / "mine.json", overwrite=overwrites)
