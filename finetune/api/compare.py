"""``finetune compare`` as a function."""

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import NotWritten
from finetune.events import Emit, ignore
from finetune.files import write_text_atomically

if TYPE_CHECKING:
    from finetune.runs.compare import Baseline, Comparison

MAX_ROWS = 10


def compare(
    *runs: str | Path,
    baseline: "Baseline" = "first",
    rows: int = MAX_ROWS,
    output: str | Path | None = None,
    emit: Emit = ignore,
) -> "Comparison":
    """Compare finished runs on their test rows, as ``finetune compare`` does.

    Args:
        runs: Run folders, or folders that contain some.
        baseline: The run that the others are compared with: the ``first``, or the ``best`` by its
            validation metric.
        rows: At most so many of those that one run has right and the other wrong, each way.
        output: A page to write; an earlier one is replaced.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        NotARun: If a folder is no finished run and contains none.
        UsageError: If there are fewer than two runs.
        DataDiffers: If they were tested on different rows.
        NotWritten: If the page can't be written.
    """
    from finetune.runs.compare import compare_runs
    from finetune.runs.finished import FinishedRun, find_finished_runs

    folders = find_finished_runs([Path(one).expanduser() for one in runs], emit=emit)
    found = [FinishedRun.read(folder) for folder in folders]
    comparison = compare_runs(found, baseline=baseline, most_rows=rows)
    if output is not None:
        _write_page(comparison, Path(output))
    return comparison


def _write_page(comparison: "Comparison", path: Path) -> None:
    from finetune.report.compare import render_comparison

    page = render_comparison(comparison)
    try:
        write_text_atomically(path, page)
    except OSError as error:
        raise NotWritten(
            f"{path} can't be written: {error.strerror}",
            remedy="name a file in a folder that exists, such as compare.html",
        ) from error
