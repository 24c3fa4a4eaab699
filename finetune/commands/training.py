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
from finetune.devices.mps.power import why_slowed
from finetune.distributed.processes import ALONE, Processes
from finetune.events import Emit, WarningMessage
from finetune.runs.failures import interruption_explained, too_much_work_explained
from finetune.runs.finish import finish
from finetune.runs.folder import RunFolder
from finetune.runs.journal import WarningLog
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import Preparation, prepare
from finetune.runs.results import RunResults
from finetune.runs.run import Run
from finetune.runs.tracking import tracked


def train(work: Work, *, emit: Emit, processes: Processes = ALONE) -> RunResults:
    """Train a new run, or one that was interrupted, to its end.

    The folder of a new run is reserved first, and given back if nothing came of it.

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
        preparation = prepare(work.config, origins=work.origins, emit=log, processes=processes)
        if work.continued:
            _check_data(preparation, work.continued)
        with too_much_work_explained(folder, preparation):
            return _complete(_start(preparation, folder, resumes=bool(work.resumed), log=log))


def train_seed(preparation: Preparation, folder: RunFolder, *, log: WarningLog) -> Preparation:
    """Train one of several seeds from where it stopped, or from its beginning.

    Returns:
        What the next may share: with what was chosen by measurements.

    Raises:
        FinetuneError: With an exit code and a remedy.
        KeyboardInterrupt: If a signal stopped it.
    """
    resumes = folder.can_resume
    held = folder.lock() if resumes else RunFolder(folder.path).create(overwrite=True)
    with held as folder, too_much_work_explained(folder, preparation):
        run = _start(preparation, folder, resumes=resumes, log=log)
        _complete(run)
        return run.preparation


def _start(preparation: Preparation, folder: RunFolder, *, resumes: bool, log: WarningLog) -> Run:
    start = Run.resume if resumes else Run.prepare
    run = start(preparation, folder, emit=log)
    if run.processes.is_main:
        log.write_to(folder)
    return run


def _check_data(preparation: Preparation, continued: RunFolder) -> None:
    remedy = "restore it, or train the model on it as a new run, with --model"
    now = replace(Manifest.of(preparation), model={})
    saved = Manifest.read(continued.manifest_file)
    saved.check(now, remedy=f"{remedy} {continued.model_folder}")


def _complete(run: Run) -> RunResults:
    config, is_main = run.preparation.resolved_config, run.processes.is_main
    with tracked(config, run.folder, emit=run.emit, is_main=is_main) as tracking:
        run = replace(run, emit=tracking)
        run.train()
        if reason := why_slowed():
            run.emit(WarningMessage(f"{reason}, so training may have taken longer than it could"))
        results = finish(run, write_pages=write_pages)
        tracking.report_test(
            results.test.metrics, step=run.progress.steps, epoch=results.training.epoch
        )
    return results


@contextmanager
def _hold(work: Work, processes: Processes) -> Iterator[RunFolder]:
    """Let the main process hold the run's folder, and the others know which."""
    if not processes.is_main:
        yield processes.broadcast(lambda: RunFolder(Path()))
        return
    with work.resumed.lock() if work.resumed else reserve(work.config) as folder:
        yield processes.broadcast(lambda: folder)
