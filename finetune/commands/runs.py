"""``finetune runs``: lists runs with their data, model, accuracy and time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.errors import FinetuneError
from finetune.events import WarningMessage, emit
from finetune.runs.folder import RUNS_FOLDER, RunFolder, SeveralFolder, list_runs
from finetune.tasks.tables import duration

EXAMPLES = """\b
Examples:
  finetune runs                   list the runs in runs/
  finetune compare runs           compare all metrics of these runs
  finetune predict latest FILE    classify a file with the newest run
"""
FIELDS = (
    *("run", "status", "written_at", "data", "model", "mode"),
    *("metric", "value", "low", "high", "train_runtime"),
)


def _describe(folder: RunFolder) -> dict[str, Any]:
    """Return the ``--json`` entry of a run, or of several seeds, folds or trials.

    ``value`` is the first metric on test rows: for folds, on all rows; for seeds, the mean.
    ``low`` and ``high`` are its 95% interval over rows, or None. ``train_runtime`` is the sum over
    all runs, in seconds.
    """
    listed: dict[str, Any] = dict.fromkeys(FIELDS)
    listed |= {"run": str(folder.path), "status": "unreadable", "written_at": 0.0}
    try:
        runs = folder.runs if isinstance(folder, SeveralFolder) else [folder]
        # Some of the runs might not have started.
        runs = [run for run in runs if run.config_file.is_file()]
        times = (run.config_file.stat().st_mtime for run in runs)
        listed["written_at"] = max(times, default=0.0)
        for run in runs:
            run.report_edits()
        config = folder.read_config()
        listed |= {"data": config.data.data, "model": config.model.model}
        listed |= {"mode": config.model.mode, "status": "not finished"}
        if folder.has_finished:
            listed["status"] = "unreadable"
            listed |= _read_scores(folder, [run for run in runs if run.has_finished])
            several = isinstance(folder, SeveralFolder) and f"{len(runs)} {folder.run_kind}s"
            listed["status"] = several or "finished"
    except FinetuneError as error:
        emit(WarningMessage(error.message, remedy=error.remedy))
    return listed


def _read_scores(folder: RunFolder, finished: Sequence[RunFolder]) -> dict[str, Any]:
    from finetune.runs.results import read_results
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import Scores

    results = [read_results(run) for run in finished]
    if not results[0].test.samples:  # without labels
        return {"train_runtime": results[0].training.train_runtime}
    scores, name = results[0].test, results[0].test.values[0].metric.name
    value, is_of_folds = fmean(run.test.values[0].value for run in results), folder.kind == "folds"
    if isinstance(folder, SeveralFolder) and is_of_folds:

        def parse(content: dict[str, Any]) -> Scores:
            """Return the metrics over all rows that the run printed at its end."""
            ends = content["intervals"][name]["low"], content["intervals"][name]["high"]
            return replace(Scores.from_json(content["test"]), intervals={name: ends})

        scores = folder.read(folder.table_file, parse)
        value = scores.metrics[name]
    limits = replace(scores, metrics={name: value}).limits(name)
    if len(results) > 1 and not is_of_folds and not METRICS[name].is_proportion:
        limits = None
    low, high = limits or (None, None)
    seconds = sum(run.training.train_runtime for run in results)
    return {"metric": name, "value": value, "low": low, "high": high, "train_runtime": seconds}


@click.command(epilog=EXAMPLES)
@click.argument("folder", required=False, type=flags.PATH, default=RUNS_FOLDER)
@flags.with_json
def command(*, folder: Path, display: flags.Display) -> None:
    """List the runs in FOLDER, newest first. Default: runs/."""
    with display.progress():
        runs = {"runs": [_describe(run) for run in list_runs(folder)]}
    display.show(runs, lambda runs: _show(runs["runs"], folder))


def _show(listed: Sequence[Mapping[str, Any]], folder: Path) -> None:
    if not listed:
        show_lines(f"no runs in {folder.absolute()}; create one with: finetune run FILE")
        return
    from finetune.tasks.metrics import METRICS
    from finetune.tasks.scores import MetricValue

    rows = []
    for run in listed:
        result, interval, seconds = run["status"], "", ""
        if run["metric"]:
            metric = METRICS[run["metric"]]
            result = f"{metric.title} {MetricValue(metric, run['value'])}"
            seconds = duration(run["train_runtime"])
            if run["low"] is not None:
                limits = (MetricValue(metric, run[limit]) for limit in ("low", "high"))
                interval = "–".join(map(str, limits))
        started = f"{datetime.fromtimestamp(run['written_at']):%Y-%m-%d %H:%M}"
        names = (Path(run["data"] or "").name, Path(run["model"] or "").name, run["mode"] or "")
        kind = run["status"] if run["status"][0].isdigit() else ""
        rows.append((run["run"], started, *names, result, interval, seconds, kind))
    titles = ("run", "started", "data", "model", "mode", "test", "95% CI", "trained in", "")
    show_table(titles, rows, numbers=("95% CI", "trained in"))
