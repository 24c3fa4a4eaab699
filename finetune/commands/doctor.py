"""``finetune doctor``: checks whether this machine is ready and its GPU computes correctly."""

import sys
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_json, show_lines, show_table
from finetune.config.schema import DEFAULT_BATCH_SIZE, ModelConfig, TrainingConfig, flag_of
from finetune.devices import PRECISIONS
from finetune.errors import DeviceNotAvailableError, FinetuneError, UsageError
from finetune.files import escape_line

if TYPE_CHECKING:
    from finetune.doctor.models import OperatorReport, ParityReport

EXAMPLES = """\b
Examples:
  finetune doctor                    what to paste into an issue
  finetune doctor --device mps       exit code 4 if MPS can't be used
  finetune doctor --ops --model minilm --freeze-core
  finetune doctor --parity --device mps --precision bf16
"""
MODE_OPTIONS = ("freeze_core", "head", "train_layers")
PRECISION = TrainingConfig().precision_without_timing
PARITY_BATCH_SIZE = 128
COLORS = {"ok": "green", "n/a": "white", "warning": "yellow", "failure": "red"}


@click.command(epilog=EXAMPLES)
@flags.device_option
@click.option("--ops", is_flag=True, help="Check whether MPS supports the operators of a model.")
@click.option("--parity", is_flag=True, help="Compare the results of the device with the CPU.")
@click.option(
    "--model",
    type=flags.NAME,
    help="Model for --ops and --parity: a folder, Hub ID or minilm; for --ops also "
    "MODULE:FUNCTION, which returns a module and a batch. Default: BERT-base.",
)
@flags.chosen_options(*MODE_OPTIONS)
@click.option("--precision", type=click.Choice(PRECISIONS), help="Precision. Default: fp32.")
@click.option(
    "--batch-size",
    type=click.IntRange(1, 4096),
    help=f"Largest batch. Default: {DEFAULT_BATCH_SIZE}; for --parity {PARITY_BATCH_SIZE}.",
)
@flags.with_display
def command(
    *, device: str, ops: bool, parity: bool, display: flags.Display, **options: Any
) -> None:
    """Check whether this machine is ready, and print what to do if it isn't.

    The command checks CPU, system, versions, memory, disks and the Hub, and tries each GPU. The
    exit code is 0 if the device works, otherwise 4.

    --ops checks, on any machine, whether MPS supports all operators of a model. --parity checks
    whether the device agrees with the CPU in evaluation and training. If not, the exit code is 1.
    """
    chosen = flags.without_none(options)
    if ops and parity:
        raise UsageError("--ops and --parity can't be combined", remedy="drop one of them")
    if ops:
        _check_operators(chosen, display=display)
    elif parity:
        _check_parity(device, chosen, display=display)
    elif chosen:
        flag = flag_of(next(iter(chosen)))
        raise UsageError(
            f"{flag} has no effect without --ops or --parity", remedy="add one of them"
        )
    else:
        _check(device, display=display)


def _with_mode(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the flags that select a mode by the mode."""
    mode_options = {name: options.pop(name) for name in MODE_OPTIONS if name in options}
    return options | {"mode": flags.load(**mode_options).config.model.mode}


def _check(device: str, *, display: flags.Display) -> None:
    from finetune.doctor.checkup import check_machine

    checks = []
    for check in check_machine(device=device):  # shown as they arrive
        checks.append(check)
        is_fine = check.status in ("ok", "n/a")
        if not (display.as_json or (display.quiet and is_fine)):
            status = click.style(f"{check.status:<9}", fg=COLORS[check.status])
            click.echo(f"{status}{check.name.replace('_', ' '):<17}{escape_line(check.finding)}")
            if check.remedy:
                click.echo(f"{'':<26}try: {escape_line(check.remedy)}")
    if display.as_json:
        show_json({"device": device, "checks": checks})
    if checks[-1].status == "failure":
        sys.exit(DeviceNotAvailableError.exit_code)


def _check_operators(chosen: dict[str, Any], *, display: flags.Display) -> None:
    from finetune.doctor.models import audit_model, audit_module
    from finetune.model.load import load_factory

    source = chosen.pop("model", ModelConfig.model)
    if ":" not in source:
        options = {"precision": PRECISION, "batch_size": DEFAULT_BATCH_SIZE, **chosen}
        report = audit_model(source, **_with_mode(options))
    elif not chosen:
        report = audit_module(*load_factory(source))
    else:
        raise UsageError(f"{source} can't be combined with other options", remedy="drop them")
    display.show(report, lambda report: _show_operators(report, source))
    if report.missing:
        raise FinetuneError(
            f"MPS lacks {', '.join(operator.name for operator in report.missing)}",
            remedy="replace the modules that call it, or use --device cpu",
        )


def _show_operators(report: "OperatorReport", source: str) -> None:
    rows = [
        (operator.name, operator.status, str(operator.calls), ", ".join(operator.modules[:2]))
        for operator in report.operators
    ]
    show_table(("operator", "status", "calls", "called by"), rows, numbers=("calls",))
    for warning in report.warnings:
        show_lines(f"warning: {warning.message}", f"  try: {warning.remedy}")
    if not report.missing:
        show_lines(f"MPS supports all {len(report.operators)} operators of {source}")


def _check_parity(device: str, chosen: dict[str, Any], *, display: flags.Display) -> None:
    def compare() -> "ParityReport":
        from finetune.doctor.models import check_parity

        options = {"model": None, "precision": PRECISION, "batch_size": PARITY_BATCH_SIZE, **chosen}
        return check_parity(device, **_with_mode(options))

    report = display.run(compare, _show_parity)
    if report.failures:
        parts = ", ".join(dict.fromkeys(difference.part for difference in report.failures))
        raise FinetuneError(
            f"{report.device} in {report.precision} differs from the CPU: {parts}",
            remedy="use --device cpu or another version of PyTorch, and report this output",
        )


def _show_parity(report: "ParityReport") -> None:
    """Print the worst relative error of each part, and its tensor."""
    rows = [
        (
            *(part, f"{difference.error:.1e}", f"{difference.tolerance:.1e}"),
            *("ok" if difference.passes else "failure", difference.tensor),
        )
        for part, difference in report.worst_by_part().items()
    ]
    columns = ("part", "worst error", "tolerance", "status", "where")
    show_table(columns, rows, numbers=columns[1:3])
    if not report.failures:
        show_lines(f"{report.device} in {report.precision} agrees with the CPU in fp32")
