import os
from pathlib import Path

import pytest

from finetune.config.write import write_new_file
from finetune.errors import UsageError


def test_a_new_file_holds_the_text(tmp_path: Path) -> None:
    write_new_file(tmp_path / "new.yaml", "# größe\n")
    assert (tmp_path / "new.yaml").read_bytes() == "# größe\n".encode()


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        write_new_file(file, "other")
    assert file.read_text() == "mine"


def test_a_folder_that_is_not_there_is_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be written: No such file or directory"):
        write_new_file(tmp_path / "missing" / "new.yaml", "")
    assert os.listdir(tmp_path) == []
