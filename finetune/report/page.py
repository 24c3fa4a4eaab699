"""The report: a run's results as one page, ``report.html``, that needs no other file."""

import math
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from finetune.evaluation.metrics import Scores
from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.curves import draw_curves
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults

MOST_MISTAKES = 20


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path."""
    predictions = read_jsonl(folder.predictions_file)
    mistakes = [row for row in predictions if row["predicted"] != row["label"]]
    page = TEMPLATES.get_template("report.html.j2").render(
        name=folder.path.resolve().name,
        facts=results.facts,
        training=results.training,
        validation=results.validation,
        test=results.test,
        standard_error=standard_error(results.test),
        curves=draw_curves(read_jsonl(folder.metrics_file)),
        mistakes=mistakes,
        shown_mistakes=nlargest(MOST_MISTAKES, mistakes, key=itemgetter("probability")),
        config=folder.config_file.read_text(encoding="utf-8"),
        environment=read_json(folder.environment_file),
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file


def percent(share: float) -> str:
    """Return a share of 0..1 in percent, such as ``97.2 %``."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a time such as ``9.5 s``, ``24 min 13 s`` or ``2 h 14 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_seconds} s"


def standard_error(scores: Scores) -> float:
    """Return the standard error of an accuracy, in 0..1."""
    return math.sqrt(scores.accuracy * (1 - scores.accuracy) / scores.samples)


TEMPLATES = Environment(
    loader=PackageLoader("finetune", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"percent": percent, "duration": duration}
