"""``finetune runs``: lists runs with data, model, accuracy and time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

import click

from finetune.commands import flags
from finetune.commands.console import show_json, show_lines, show_table
from finetune.errors import FinetuneError
from finetune.runs.folder import RUNS_FOLDER, FoldsFolder, RunFolder, SeveralFolder, list_runs

EXAMPLES = """\b
Examples:
  finetune runs                   runs in the folder runs
  finetune compare runs           all metrics, and their differences
  finetune predict latest FILE    classify a file with the newest run
"""


@dataclass
class ListedRun:
    """A run, or several of one kind, and the first metric of its test rows.

    ``low`` to ``high`` is the 95% interval over rows, if it is known. For folds, ``value`` is the
    metric of all rows; for seeds, the mean. ``train_runtime`` is the sum of all runs, in seconds.
    """

    run: str
    status: str = "unreadable"
    written_at: float = 0.0
    data: str | None = None
    model: str | None = None
    mode: str | None = None
    metric: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    train_runtime: float | None = None


def _describe(folder: RunFolder) -> ListedRun:
    from finetune.runs.results import read_results
    from finetune.tasks.scores import Scores

    runs = folder.runs if isinstance(folder, SeveralFolder) else [folder]
    # Other runs of several did not start, or failed.
    runs = [run for run in runs if run.config_file.is_file()]
    listed = ListedRun(str(folder.path))
    with suppress(FinetuneError):
        listed.written_at = max((run.config_file.stat().st_mtime for run in runs), default=0.0)
        config = folder.read_config()
        listed.data, listed.model = config.data.data, config.model.model
        listed.mode, listed.status = config.model.mode, "not finished"
        if not folder.has_finished:
            return listed
        listed.status = "edited"
        # Trials of a sweep may have been stopped early.
        found = [read_results(run) for run in runs if run.has_finished]
        metric = found[0].test.values[0].metric
        listed.metric = metric.name
        listed.value = fmean(one.test.values[0].value for one in found)
        scores = replace(found[0].test, metrics={metric.name: listed.value})
        if isinstance(folder, FoldsFolder):
            # Over all rows, as the end of the run shows it.
            content = folder.read(folder.table_file, dict)
            scores = Scores.from_json(content["test"])
            ends = {name: (one["low"], one["high"]) for name, one in content["intervals"].items()}
            scores, listed.value = replace(scores, intervals=ends), scores.metrics[metric.name]
        if len(found) == 1 or metric.is_proportion or isinstance(folder, FoldsFolder):
            listed.low, listed.high = scores.limits(metric.name) or (None, None)
        listed.train_runtime = sum(one.training.train_runtime for one in found)
        listed.status = "finished"
        if isinstance(folder, SeveralFolder):
            listed.status = f"{len(runs)} {folder.run_kind}s"
    return listed


@click.command(epilog=EXAMPLES)
@click.argument("folder", required=False, type=flags.PATH, default=RUNS_FOLDER)
@flags.json_option
@flags.debug_option
def command(*, folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, newest first. Default: the folder runs."""
    found = [_describe(run) for run in list_runs(folder)]
    if as_json:
        show_json({"runs": [*map(asdict, found)]})
    elif found:
        _show(found)
    else:
        show_lines(f"no runs in {folder.absolute()}; make one with: finetune run FILE")


def _show(found: Sequence[ListedRun]) -> None:
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import MetricValue
    from finetune.tasks.tables import duration

    rows = []
    for one in found:
        result, interval, seconds = one.status, "", ""
        if one.metric and one.value is not None and one.train_runtime is not None:
            value = MetricValue(METRICS[one.metric], one.value)
            result, seconds = f"{value.metric.title} {value}", duration(one.train_runtime)
            if one.low is not None and one.high is not None:
                interval = "–".join(str(MetricValue(value.metric, x)) for x in (one.low, one.high))
        when = f"{datetime.fromtimestamp(one.written_at):%Y-%m-%d %H:%M}"
        names = (Path(one.data or "").name, Path(one.model or "").name, one.mode or "")
        kind = one.status if one.status[0].isdigit() else ""
        rows.append((one.run, when, *names, result, interval, seconds, kind))
    titles = ("run", "started", "data", "model", "mode", "test", "95% interval", "trained in", "")
    show_table(titles, rows, numbers=("95% interval", "trained in"))
