import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.doctor.storage import check_disk


@pytest.fixture
def pretend_free(monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets every disk have so many bytes free."""

    def pretend(free_bytes: float) -> None:
        usage = SimpleNamespace(free=int(free_bytes))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return pretend


def test_a_disk_with_room_is_ok(tmp_path: Path, pretend_free) -> None:
    pretend_free(75e9)
    check = check_disk("run_disk", tmp_path, remedy="make room")
    assert (check.name, check.status, check.remedy) == ("run_disk", "ok", "")
    assert check.finding == f"75.0 GB free at {tmp_path}"


def test_a_disk_that_is_nearly_full_is_a_warning_with_what_is_needed(
    tmp_path: Path, pretend_free
) -> None:
    pretend_free(1.2e9)
    check = check_disk("run_disk", tmp_path, remedy="make room")
    assert (check.status, check.remedy) == ("warning", "make room")
    assert check.finding.startswith("1.2 GB free")
    assert "takes up to 3.5 GB" in check.finding


def test_the_disk_of_a_folder_that_is_yet_to_be_made_is_that_of_its_parents(tmp_path: Path) -> None:
    check = check_disk("hub_disk", tmp_path / "a" / "b", remedy="make room")
    assert check.finding.endswith(f"free at {tmp_path / 'a' / 'b'}")


def test_a_folder_that_can_not_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, whatever the folder's mode.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = check_disk("hub_disk", tmp_path / "a", remedy="set HF_HOME")
    assert (check.status, check.remedy) == ("failure", "set HF_HOME")
    assert check.finding == f"{tmp_path} can't be written"
