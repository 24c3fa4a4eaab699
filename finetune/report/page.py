"""The report: a run's results as one page, ``report.html``, that needs no other file."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

from finetune.events import WarningMessage
from finetune.files import write_text_atomically
from finetune.report import sections
from finetune.report.names import name_of_data, name_of_model, remove_folders, without_folders
from finetune.report.templates import TEMPLATES
from finetune.runs.folder import RunFolder
from finetune.runs.journal import read_warnings
from finetune.runs.results import RunResults
from finetune.tasks.tables import MAX_MISTAKES


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path.

    The report may be published: of a path on this machine it names at most the last part.
    """
    config, facts, test = folder.read_config(), results.facts, results.test
    predictions = folder.read(folder.predictions_file, list)
    mistakes = folder.read(folder.predictions_file, results.task.mistakes)
    journal = folder.read(folder.metrics_file, list)
    environment = folder.read(folder.environment_file, dict)
    name = folder.path.resolve().name
    warnings = [
        WarningMessage(
            remove_folders(warning.message, config), remedy=remove_folders(warning.remedy, config)
        )
        for warning in read_warnings(folder)
        # It is shown below the metrics.
        if warning.message != test.warning
    ]
    curves = sections.draw_curves(journal, test.metrics)
    shown = chain(
        [sections.Section("curves", "Curves", charts=curves)] if curves else [],
        sections.describe_results(results, predictions, mistakes),
        sections.describe_probabilities(results.calibration, predictions),
        [sections.describe_speed(results, journal)],
        sections.describe_details(results.details),
        sections.describe_configuration(without_folders(config), environment, name=name),
    )
    page = TEMPLATES.get_template("report.html.j2").render(
        name=name,
        facts=replace(facts, data=name_of_data(facts.data), model=name_of_model(facts.model)),
        training=results.training,
        validation=results.validation,
        test=test,
        warnings=warnings,
        sections=list(shown),
        groups={group: title for titles in mistakes.groups for group, title in titles.items()},
        first_mistakes=MAX_MISTAKES,
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file
