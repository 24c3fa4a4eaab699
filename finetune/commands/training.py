"""The work of ``finetune run``: one training, or several that differ in their seed."""

from contextlib import nullcontext
from pathlib import Path

from finetune.commands.report import write_pages
from finetune.commands.resuming import Work
from finetune.config.schema import change_options
from finetune.devices.mps.power import kept_awake
from finetune.distributed.processes import join_processes
from finetune.events import Emit, Info
from finetune.runs.failures import interruption_explained
from finetune.runs.folder import RunFolder, SeedsFolder
from finetune.runs.journal import Journal
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import prepare
from finetune.runs.results import RunResults, SeedResults
from finetune.runs.run import Run


def train(work: Work, *, emit: Emit) -> RunResults:
    """Train a new run, or one that was interrupted, to its end.

    The folder of a new run is created first, and deleted if nothing came of it. Each of several
    processes calls this; a run may be resumed with more of them.
    """
    journal, processes = Journal(emit), join_processes()
    lock = work.lock() if processes.is_main else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked):
        # The main process tells the others which it is.
        folder = processes.broadcast(lambda: locked)
        preparation = prepare(
            work.config, option_sources=work.sources, emit=journal, processes=processes
        )
        resumes, continues = bool(work.resumed), work.continued
        with Run.begin(
            preparation, folder, resumes=resumes, continues=continues, journal=journal
        ) as run:
            run.train()
            return run.finish(write_pages=write_pages)


def train_seeds(work: Work, *, emit: Emit) -> SeedResults:
    """Train several seeds, from that of the configuration on; those that have finished stay.

    All use the same data, device and token ids, which are prepared once.
    """
    config, journal = work.config, Journal(emit)
    seeds = range(config.training.seed, config.training.seed + (work.seeds or 1))

    with kept_awake(), work.lock() as locked:
        folder = SeedsFolder(locked.path, len(seeds))

        def read_results() -> SeedResults:
            return SeedResults.read(folder, seeds, metric=config.training.metric_for_best_model)

        missing = [one for one in seeds if not work.resumed or not folder.run(one).has_finished]
        if not missing:
            emit(Info(f"the runs in {folder.path} have finished: nothing is left to do"))
            return read_results()
        with interruption_explained(folder):
            first = change_options(config, {"seed": missing[0]})
            preparation = prepare(first, option_sources=work.sources, emit=journal)
            if not work.resumed:
                folder.start(emit=emit)
            elif before := folder.first_begun:
                saved = Manifest.read(before)
                remedy = "restore it, or train in another folder"
                saved.check(Manifest.of(preparation), remedy=remedy)
            folder.write_seeds(read_results().to_json())
            for seed in missing:
                emit(Info(f"seed {seed}, {seeds.index(seed) + 1} of {len(seeds)}"))
                place, run_journal = folder.run(seed), journal.copy()
                if seed != missing[0]:
                    preparation = preparation.with_seed(seed, emit=run_journal)
                resumes = place.can_resume
                with (
                    place.lock() if resumes else place.create(overwrite=True),
                    Run.begin(preparation, place, resumes=resumes, journal=run_journal) as run,
                ):
                    run.train()
                    run.finish(write_pages=write_pages)
                    # With what was chosen by measurements.
                    preparation = run.preparation
                folder.write_seeds(read_results().to_json())
        return read_results()
