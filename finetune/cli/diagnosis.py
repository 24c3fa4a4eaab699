"""Shows what the doctor found, in lines that are never broken, so that they can be pasted."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from finetune.devices.check import Check

if TYPE_CHECKING:
    from finetune.doctor.operators import Operator, OperatorReport
    from finetune.doctor.parity import Difference, ParityReport

STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}
MODULES_SHOWN = 2


def shown(checks: Iterable[Check]) -> Iterator[Check]:
    """Print each check as it comes, and pass it on."""
    from rich.console import Console
    from rich.text import Text

    from finetune.cli.console import LITERAL

    console = Console(soft_wrap=True, **LITERAL)
    for check in checks:
        status = (f"{check.status:<9}", STYLES[check.status])
        name = check.name.replace("_", " ")
        console.print(Text.assemble(status, f"{name:<16}{check.finding}"))
        if check.remedy:
            console.print(f"{'':<9}{'':<16}try: {check.remedy}")
        yield check


def show_operators(report: "OperatorReport", *, source: str) -> None:
    """Print the operators that a model needs, how MPS runs each, and the warnings."""
    _show_table(
        ("operator", "status", "calls", "called by"),
        [(one.name, one.status, str(one.calls), _callers(one)) for one in report.operators],
    )
    for warning in report.warnings:
        click.echo(f"warning: {warning.message}\n  try: {warning.remedy}")
    if not report.missing:
        click.echo(f"MPS has all {len(report.operators)} operators that {source} needs")


def show_parity(report: "ParityReport") -> None:
    """Print the worst relative error of each part and of each module."""
    _show_table(
        ("part", "worst error", "tolerance", "status", "where"),
        [
            (part, _figure(one), f"{one.tolerance:.1e}", _verdict(one), one.tensor)
            for part, one in report.worst_by_part().items()
        ],
    )
    by_module = report.worst_by_module()
    parts = list(dict.fromkeys(part for by_part in by_module.values() for part in by_part))
    _show_table(
        ("module", *parts, "worst"),
        [
            (module, *(_figure(by_part[part]) for part in parts), _worst(by_part.values()))
            for module, by_part in by_module.items()
        ],
    )
    if not report.failures:
        click.echo(
            f"{report.device} in {report.precision} computes what the processor does in fp32"
        )


def _show_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns of which each is as wide as it needs to be, and an empty line."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    click.echo()


def _callers(operator: "Operator") -> str:
    count = len(operator.modules)
    if operator.status == "missing" or count <= MODULES_SHOWN + 1:
        return ", ".join(operator.modules)
    return f"{', '.join(operator.modules[:MODULES_SHOWN])} and {count - MODULES_SHOWN} more"


def _figure(difference: "Difference") -> str:
    return f"{difference.error:.1e}"


def _verdict(difference: "Difference") -> str:
    return "ok" if difference.passes else "failure"


def _worst(differences: Iterable["Difference"]) -> str:
    worst = max(differences, key=lambda one: one.error / one.tolerance)
    return f"{worst.tensor}, {worst.part}"
