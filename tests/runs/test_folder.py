"""Opening the folder of a run."""

from pathlib import Path

import pytest

from finetune.errors import NotARun
from finetune.runs.folder import RunFolder, open_run_folder


def test_interrupted_run_opens_only_where_no_model_is_needed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.touch()

    with pytest.raises(NotARun, match="model"):
        open_run_folder(tmp_path)
    assert open_run_folder(tmp_path, needs_model=False) == folder

    folder.model_folder.mkdir()
    assert open_run_folder(tmp_path) == folder


@pytest.mark.parametrize("name", ["missing", "."])
def test_folder_without_a_run_does_not_open(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotARun):
        open_run_folder(tmp_path / name)
