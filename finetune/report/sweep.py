"""The table of a sweep, and its page."""

from finetune.files import write_text_atomically
from finetune.report.compare import show_difference
from finetune.report.templates import TEMPLATES
from finetune.runs.folder import SweepFolder
from finetune.runs.sweep import SweepResults
from finetune.tasks.metrics import METRICS, MetricValue
from finetune.tasks.tables import Table, format_value


def write_sweep_report(folder: SweepFolder, results: SweepResults) -> None:
    """Write the page of a sweep, which needs no other file."""
    page = TEMPLATES.get_template("tables.html.j2").render(
        title=folder.path.resolve().name,
        subtitle=f"finetune sweep · {len(results.trials)} trials · "
        f"{results.samples:,} validation rows",
        tables=[tabulate_sweep(results)],
    )
    folder.claim(folder.report_file)
    write_text_atomically(folder.report_file, page)


def tabulate_sweep(results: SweepResults) -> Table:
    """Return the trials, the best first, with their differences to it."""
    metric, names = METRICS[results.metric], [*next(iter(results.trials.values())).options]
    rows = [
        (f"trial-{number}", *(format_value(one.options[name]) for name in names),
         "–" if one.value is None else str(MetricValue(metric, one.value)),
         show_difference(one.difference, metric) if one.difference else "",
         one.verdict or "the best")
        for number, one in results.ranked
    ]  # fmt: skip
    note = (
        f"Differences are paired: both trials on the same resamples of {results.samples:,} "
        "validation rows. In brackets is the 95% interval; where it contains 0, the difference may "
        "be noise. The best of many looks better here than it is: test it on other rows."
    )
    columns = ("trial", *(name.replace("_", " ") for name in names), metric.title)
    columns = (*columns, "difference to the best", "verdict")
    return Table("Trials", columns, rows, text_columns=len(columns), note=note)
