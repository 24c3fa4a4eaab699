"""The report: a run's results as one page, ``report.html``, that needs no other file."""

import math
from heapq import nlargest
from operator import itemgetter
from pathlib import Path

from finetune.evaluation.metrics import Scores
from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.curves import draw_curves
from finetune.report.templates import TEMPLATES
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


def standard_error(scores: Scores) -> float:
    """Return the standard error of an accuracy, in 0..1."""
    return math.sqrt(scores.accuracy * (1 - scores.accuracy) / scores.samples)
