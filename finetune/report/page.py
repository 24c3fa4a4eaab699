"""The report: a run's results as one page, ``report.html``, that needs no other file."""

from itertools import chain
from pathlib import Path

from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.charts import draw_curves
from finetune.report.sections import (
    Section,
    describe_configuration,
    describe_details,
    describe_probabilities,
    describe_results,
    describe_speed,
)
from finetune.report.templates import TEMPLATES
from finetune.runs.folder import RunFolder, load_saved_config
from finetune.runs.journal import read_warnings
from finetune.runs.results import RunResults
from finetune.tasks.base import MOST_MISTAKES


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path."""
    name = folder.path.resolve().name
    predictions = read_jsonl(folder.predictions_file)
    mistakes = results.task.mistakes(predictions)
    journal = read_jsonl(folder.metrics_file)
    config, environment = load_saved_config(folder), read_json(folder.environment_file)
    sections = chain(
        [Section("curves", "Curves", charts=draw_curves(journal, results.test.figures))],
        describe_results(results, predictions, mistakes),
        describe_probabilities(results.calibration, predictions),
        [describe_speed(results, journal)],
        describe_details(results.details),
        describe_configuration(config, environment, name=name),
    )
    page = TEMPLATES.get_template("report.html.j2").render(
        name=name,
        facts=results.facts,
        training=results.training,
        validation=results.validation,
        test=results.test,
        # That of the test split comes last, when the page is written, and stands on it anyway.
        warnings=[one for one in read_warnings(folder) if one.message != results.test.warning],
        sections=[one for one in sections if one.has_content],
        groups={group: title for own in mistakes.groups for group, title in own.items()},
        first_mistakes=MOST_MISTAKES,
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file
