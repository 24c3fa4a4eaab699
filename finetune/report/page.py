"""The report: a run's results as one page, ``report.html``, that needs no other file."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from finetune.config.schema import Config
from finetune.errors import NotARun
from finetune.events import WarningMessage
from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.charts import draw_curves
from finetune.report.names import (
    name_of_data,
    name_of_model,
    remove_folders,
    without_folders,
)
from finetune.report.sections import (
    Section,
    describe_configuration,
    describe_details,
    describe_probabilities,
    describe_results,
    describe_speed,
)
from finetune.report.templates import TEMPLATES
from finetune.runs.folder import RunFolder
from finetune.runs.journal import read_warnings
from finetune.runs.results import RunResults
from finetune.tasks.tables import MAX_MISTAKES


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path.

    The report may be published: of a path on this machine it names at most the last part.

    Raises:
        NotARun: If a file of the run is missing or can't be read.
    """
    name = folder.path.resolve().name
    config = folder.read_config()
    try:
        predictions = read_jsonl(folder.predictions_file)
        mistakes = results.task.mistakes(predictions)
        journal = read_jsonl(folder.metrics_file)
        environment = read_json(folder.environment_file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        files = folder.predictions_file, folder.metrics_file, folder.environment_file
        raise NotARun(
            f"{', '.join(file.name for file in files)}: one of {folder.path} is missing or can't be"
            " read",
            remedy="restore it, or make the run again",
        ) from error
    sections = chain(
        [Section("curves", "Curves", charts=draw_curves(journal, results.test.metrics))],
        describe_results(results, predictions, mistakes),
        describe_probabilities(results.calibration, predictions),
        [describe_speed(results, journal)],
        describe_details(results.details),
        describe_configuration(without_folders(config), environment, name=name),
    )
    facts = results.facts
    page = TEMPLATES.get_template("report.html.j2").render(
        name=name,
        facts=replace(facts, data=name_of_data(facts.data), model=name_of_model(facts.model)),
        training=results.training,
        validation=results.validation,
        test=results.test,
        # That of the test split comes last, when the page is written, and stands on it anyway.
        warnings=[
            one for one in _warnings_of(folder, config) if one.message != results.test.warning
        ],
        sections=[one for one in sections if one.has_content],
        groups={group: title for own in mistakes.groups for group, title in own.items()},
        first_mistakes=MAX_MISTAKES,
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file


def _warnings_of(folder: RunFolder, config: Config) -> Iterator[WarningMessage]:
    for one in read_warnings(folder):
        message, remedy = (remove_folders(text, config) for text in (one.message, one.remedy))
        yield WarningMessage(message, remedy=remedy)
