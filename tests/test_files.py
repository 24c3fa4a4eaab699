"""Atomic writes and JSON Lines."""

import errno
from pathlib import Path

import pytest

from finetune import files
from finetune.files import append_jsonl, read_jsonl, write_json, write_jsonl, write_text_atomically


def test_json_lines_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"value": value} for value in (None, 0.1 + 0.2, "a\u2028b\x85c\nd", [True, {"a": 1}])]
    write_jsonl(path, rows[:2])
    append_jsonl(path, rows[2:])
    assert read_jsonl(path) == rows


def test_nan_is_rejected_and_the_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"loss": 1.5}])
    for write in (write_jsonl, append_jsonl):
        with pytest.raises(ValueError, match="JSON"):
            write(path, [{"loss": float("nan")}])
    assert read_jsonl(path) == [{"loss": 1.5}]


def test_incomplete_last_line_is_skipped_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "whole"}\n{"text": "ö'.encode()[:-1])
    assert read_jsonl(path) == [{"text": "whole"}]

    append_jsonl(path, [{"text": "next"}])

    assert read_jsonl(path) == [{"text": "whole"}, {"text": "next"}]


def test_full_disk_error_reports_the_file_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*value\.json'"):
        write_json(tmp_path / "value.json", {})
    assert [*tmp_path.iterdir()] == []


def test_text_is_replaced_atomically_with_the_usual_mode(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    usual_mode = path.stat().st_mode

    write_text_atomically(path, "new ☃")

    assert path.read_text(encoding="utf-8") == "new ☃"
    assert path.stat().st_mode == usual_mode
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
