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
  finetune runs                   list the runs in the folder runs
  finetune compare runs           compare all metrics of these runs
  finetune predict latest FILE    classify a file with the newest run
"""


@dataclass
class ListedRun:
    """A run or several runs, and the main metric on the test rows.

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
    started = [run for run in runs if run.config_file.is_file()]
    listed = ListedRun(str(folder.path))
    with suppress(FinetuneError):
        listed.written_at = max((run.config_file.stat().st_mtime for run in started), default=0.0)
        config = folder.read_config()
        listed.data, listed.model = config.data.data, config.model.model
        listed.mode, listed.status = config.model.mode, "not finished"
        if not folder.has_finished:
            return listed
        listed.status = "unreadable"
        results = [read_results(run) for run in started if run.has_finished]
        scores = results[0].test
        metric = scores.values[0].metric
        listed.metric = metric.name
        listed.value = fmean(result.test.values[0].value for result in results)
        scores = replace(scores, metrics={metric.name: listed.value})
        if isinstance(folder, FoldsFolder):
            content = folder.read(folder.table_file, dict)
            scores = Scores.from_json(content["test"])
            ends = {
                name: (ends["low"], ends["high"]) for name, ends in content["intervals"].items()
            }
            scores, listed.value = replace(scores, intervals=ends), scores.metrics[metric.name]
        if len(results) == 1 or metric.is_proportion or isinstance(folder, FoldsFolder):
            listed.low, listed.high = scores.limits(metric.name) or (None, None)
        listed.train_runtime = sum(result.training.train_runtime for result in results)
        listed.status = "finished"
        if isinstance(folder, SeveralFolder):
            listed.status = f"{len(started)} {folder.run_kind}s"
    return listed


@click.command(epilog=EXAMPLES)
@click.argument("folder", required=False, type=flags.PATH, default=RUNS_FOLDER)
@flags.json_option
@flags.debug_option
def command(*, folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, newest first. Default: the folder runs."""
    runs = [_describe(run) for run in list_runs(folder)]
    if as_json:
        show_json({"runs": [*map(asdict, runs)]})
    elif runs:
        _show(runs)
    else:
        show_lines(f"no runs in {folder.absolute()}; make one with: finetune run FILE")


def _show(runs: Sequence[ListedRun]) -> None:
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import MetricValue
    from finetune.tasks.tables import duration

    rows = []
    for run in runs:
        result, interval, seconds = run.status, "", ""
        if run.metric and run.value is not None and run.train_runtime is not None:
            value = MetricValue(METRICS[run.metric], run.value)
            result, seconds = f"{value.metric.title} {value}", duration(run.train_runtime)
            if run.low is not None and run.high is not None:
                ends = (MetricValue(value.metric, end) for end in (run.low, run.high))
                interval = "–".join(map(str, ends))
        when = f"{datetime.fromtimestamp(run.written_at):%Y-%m-%d %H:%M}"
        names = (Path(run.data or "").name, Path(run.model or "").name, run.mode or "")
        kind = run.status if run.status[0].isdigit() else ""
        rows.append((run.run, when, *names, result, interval, seconds, kind))
    titles = ("run", "started", "data", "model", "mode", "test", "95% interval", "trained in", "")
    show_table(titles, rows, numbers=("95% interval", "trained in"))
