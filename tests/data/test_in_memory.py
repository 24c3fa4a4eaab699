from pathlib import Path

import pytest

from finetune.data.in_memory import write_table
from finetune.errors import UsageError

TABLE = {"text": ["a", "b"], "label": ["x", "y"]}


def test_a_table_is_written_once_and_never_over_a_file_of_others(tmp_path: Path) -> None:
    path = write_table(TABLE, tmp_path / "tables")
    before = path.stat().st_mtime_ns
    assert write_table(TABLE, tmp_path / "tables") == path
    assert path.stat().st_mtime_ns == before

    path.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        write_table(TABLE, tmp_path / "tables")
    assert path.read_text() == "mine"
