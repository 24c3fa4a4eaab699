"""The page of a bench."""

from finetune.bench.results import BenchResults, tabulate
from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import Table


def render_bench(results: BenchResults) -> str:
    """Return ``bench.html``, which needs no other file."""
    machine = results.machine
    facts = [("CPU", machine.cpu), ("System", machine.platform), *machine.devices.items()]
    rows = [*facts, *machine.versions.items()]
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=tabulate(results),
        machine=Table("Machine", ("name", "value"), rows, text_columns=2),
    )
