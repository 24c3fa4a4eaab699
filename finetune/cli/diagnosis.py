"""Shows what the doctor found, in lines that are never broken, so that they can be pasted."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from finetune.devices.check import Check

if TYPE_CHECKING:
    from finetune.doctor.operators import Operator, OperatorReport
    from finetune.doctor.parity import ParityReport

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
            console.print(f"{'':<25}try: {check.remedy}")
        yield check


def show_operators(report: "OperatorReport", *, source: str) -> None:
    """Print the operators that a model needs, how MPS runs each, and the warnings."""
    from finetune.cli.console import show_table

    rows = [(one.name, one.status, str(one.calls), _callers(one)) for one in report.operators]
    show_table(("operator", "status", "calls", "called by"), rows, folds=False)
    click.echo()
    for warning in report.warnings:
        click.echo(f"warning: {warning.message}\n  try: {warning.remedy}")
    if not report.missing:
        click.echo(f"MPS has all {len(report.operators)} operators that {source} needs")


def show_parity(report: "ParityReport") -> None:
    """Print the worst relative error of each part and of each module."""
    from finetune.cli.console import show_table

    rows: list[tuple[str, ...]] = [
        (
            part,
            f"{one.error:.1e}",
            f"{one.tolerance:.1e}",
            "ok" if one.passes else "failure",
            one.tensor,
        )
        for part, one in report.worst_by_part().items()
    ]
    show_table(("part", "worst error", "tolerance", "status", "where"), rows, folds=False)
    click.echo()
    by_module = report.worst_by_module()
    parts = list(dict.fromkeys(part for by_part in by_module.values() for part in by_part))
    worst = {
        module: max(by_part.values(), key=lambda one: one.error / one.tolerance)
        for module, by_part in by_module.items()
    }
    rows = [
        (
            module,
            *(f"{by_part[part].error:.1e}" for part in parts),
            f"{worst[module].tensor}, {worst[module].part}",
        )
        for module, by_part in by_module.items()
    ]
    show_table(("module", *parts, "worst"), rows, folds=False)
    click.echo()
    if not report.failures:
        click.echo(f"{report.device} in {report.precision} agrees with the CPU in fp32")


def _callers(operator: "Operator") -> str:
    count = len(operator.modules)
    if operator.status == "missing" or count <= MODULES_SHOWN + 1:
        return ", ".join(operator.modules)
    return f"{', '.join(operator.modules[:MODULES_SHOWN])} and {count - MODULES_SHOWN} more"
