"""The report: a run's results as one page, ``report.html``, that needs no other file."""

from pathlib import Path

from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.curves import draw_curves, draw_scatter
from finetune.report.templates import TEMPLATES
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path."""
    predictions = read_jsonl(folder.predictions_file)
    points = results.task.points(predictions)
    page = TEMPLATES.get_template("report.html.j2").render(
        name=folder.path.resolve().name,
        facts=results.facts,
        training=results.training,
        validation=results.validation,
        test=results.test,
        curves=draw_curves(read_jsonl(folder.metrics_file), results.test.figures),
        mistakes=results.task.mistakes(predictions),
        scatter=draw_scatter(points) if points else "",
        config=folder.config_file.read_text(encoding="utf-8"),
        environment=read_json(folder.environment_file),
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file
