import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_runs import Command

from finetune.runs.folder import RunFolder


@pytest.fixture
def moved_run(finished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "elsewhere" / finished_run.name)


def without_times(page: Path) -> str:
    """Return a page without stage durations, which change after the page is first written."""
    return re.sub(r'<section[^>]*"costs".*?</section>', "", page.read_text(), flags=re.DOTALL)


def test_report_regenerates_page_and_card_of_a_moved_run(
    command: Command, finished_run: Path, moved_run: Path
) -> None:
    for made in ("report.html", "model/README.md"):
        (moved_run / made).unlink()
    outcome = command("report", moved_run, "--json")
    assert outcome.code == 0, outcome.errors
    assert json.loads(outcome.output)["report"] == str(moved_run / "report.html")
    for made in ("report.html", "model/README.md"):
        assert without_times(moved_run / made) == without_times(finished_run / made)


def test_report_rejects_unfinished_runs(command: Command, moved_run: Path, tmp_path: Path) -> None:
    command("report", tmp_path).assert_rejected(2, "not a run folder")
    with RunFolder(moved_run).lock():
        command("report", moved_run).assert_rejected(2, "another process")
    (moved_run / "all_results.json").unlink()
    command("report", moved_run).assert_rejected(2, "all_results.json")


@pytest.mark.parametrize(
    "line",
    [
        "predict {} Who?",
        "evaluate {}",
        pytest.param("export onnx {}", marks=pytest.mark.slow),
        "push {} a/b --dry-run",
    ],
)
def test_edited_model_card_is_kept_and_accepted(
    line: str, command: Command, moved_run: Path
) -> None:
    card = moved_run / "model" / "README.md"
    card.write_text(words := card.read_text() + "My words.\n")
    outcome = command(*line.format(moved_run).split())
    assert outcome.code == 0, outcome.errors
    assert card.read_text() == words
