"""Opening the folder of a run."""

from pathlib import Path

import pytest

from finetune.errors import NotARun
from finetune.runs.folder import RunFolder, open_run_folder, seeds_file


def test_interrupted_run_opens_only_where_no_model_is_needed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.touch()

    with pytest.raises(NotARun, match="model"):
        open_run_folder(tmp_path)
    assert open_run_folder(tmp_path, needs_model=False) == folder

    folder.model_folder.mkdir()
    assert open_run_folder(tmp_path) == folder


def test_a_finished_run_without_its_model_is_not_one_to_finish(tmp_path: Path) -> None:
    for name in ("config.yaml", "all_results.json"):
        (tmp_path / name).touch()
    with pytest.raises(NotARun, match="its model is missing") as raised:
        open_run_folder(tmp_path)
    assert "make the run again" in raised.value.remedy


def test_a_name_may_begin_with_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.model_folder.mkdir(parents=True)
    folder.config_file.touch()
    assert open_run_folder(Path("~/run")) == folder


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"seeds": [], "best": null}', '{"seeds": ["a"], "best": null}',
     '{"seeds": [1], "best": "../other"}', '{"seeds": [1], "best": []}'],
)  # fmt: skip
def test_a_file_of_seeds_that_makes_no_sense_is_refused(content: str, tmp_path: Path) -> None:
    seeds_file(tmp_path).write_text(content)
    with pytest.raises(NotARun, match=r"seeds\.json can't be read"):
        open_run_folder(tmp_path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_folder_without_a_run_does_not_open(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotARun):
        open_run_folder(tmp_path / name)


@pytest.mark.parametrize("name", ["", "b", "a/model"])
def test_what_is_no_run_is_answered_with_the_runs_in_it_and_near(tmp_path: Path, name: str) -> None:
    (tmp_path / "a" / "model").mkdir(parents=True)
    RunFolder(tmp_path / "a").config_file.touch()
    with pytest.raises(NotARun) as caught:
        open_run_folder(tmp_path / name)
    assert caught.value.remedy.endswith(str(tmp_path / "a"))
    assert ("there is no folder" in caught.value.message) == (name == "b")
