"""What ``finetune run`` does once its configuration is known.

It holds a folder, prepares what several trainings may share, begins or resumes a run, trains, and
writes the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from finetune.commands.folders import reserve
from finetune.commands.report import write_pages
from finetune.commands.resuming import Work
from finetune.devices.mps.awake import kept_awake
from finetune.distributed.processes import ALONE, Processes
from finetune.events import Emit
from finetune.runs.failures import interruption_explained
from finetune.runs.folder import RunFolder
from finetune.runs.journal import WarningLog
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import Preparation, prepare
from finetune.runs.results import RunResults
from finetune.runs.run import train_and_finish


def train(work: Work, *, emit: Emit, processes: Processes = ALONE) -> RunResults:
    """Train a new run, or one that was interrupted, to its end.

    The folder of a new run is created first, and deleted if nothing came of it.

    Args:
        work: Which run, and with which options.
        emit: Receives progress events.
        processes: Those that train together; each calls this. When a run goes on there may be more
            than before.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    log = WarningLog(emit)
    with kept_awake(), _hold(work, processes) as folder, interruption_explained(folder):
        preparation = prepare(
            work.config, option_sources=work.origins, emit=log, processes=processes
        )
        if work.continued:
            _check_data(preparation, work.continued)
        results, _ = train_and_finish(
            preparation, folder, resumes=bool(work.resumed), write_pages=write_pages, log=log
        )
        return results


def train_seed(preparation: Preparation, folder: RunFolder, *, log: WarningLog) -> Preparation:
    """Train one of several seeds from where it stopped, or from its beginning.

    Returns:
        What the next may share: with what was chosen by measurements.

    Raises:
        FinetuneError: With an exit code and a remedy.
        KeyboardInterrupt: If a signal stopped it.
    """
    resumes = folder.can_resume
    with folder.lock() if resumes else folder.create(overwrite=True):
        _, preparation = train_and_finish(
            preparation, folder, resumes=resumes, write_pages=write_pages, log=log
        )
        return preparation


def _check_data(preparation: Preparation, continued: RunFolder) -> None:
    remedy = "restore it, or train the model on it as a new run, with --model"
    now = replace(Manifest.of(preparation), model={})
    saved = Manifest.read(continued)
    saved.check(now, remedy=f"{remedy} {continued.model_folder}")


@contextmanager
def _hold(work: Work, processes: Processes) -> Iterator[RunFolder]:
    """Let the main process hold the run's folder, and the others know which."""
    if not processes.is_main:
        yield processes.broadcast(lambda: RunFolder(Path()))
        return
    with work.resumed.lock() if work.resumed else reserve(work.config) as folder:
        yield processes.broadcast(lambda: folder)
