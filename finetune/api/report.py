"""``finetune report`` as a function."""

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.runs.folder import RunFolder, open_run_folder
from finetune.runs.reserving import lock

if TYPE_CHECKING:
    from finetune.runs.results import RunResults


def report(run: str | Path) -> Path:
    """Write the report and the model card of a finished run anew, as ``finetune report`` does.

    Both are made from the files of the run folder alone, which may have been moved.

    Args:
        run: The run folder.

    Returns:
        The path of the page.

    Raises:
        NotARun: If the folder holds no run that has finished.
        NotWritten: If the folder may not be written.
        RunFolderInUse: If another process is writing to it.
    """
    folder = open_run_folder(Path(run))
    from finetune.runs.results import read_results

    results = read_results(folder)
    with lock(folder):
        return write_pages(folder, results)


def write_pages(folder: RunFolder, results: "RunResults") -> Path:
    """Write what people read of a run, from the files of its folder; return the report's path."""
    from finetune.report.card import write_model_card
    from finetune.report.page import write_report

    path = write_report(folder, results)
    write_model_card(folder, results)
    return path
