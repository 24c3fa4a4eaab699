"""``finetune bench``: times the devices of this machine on published workloads."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.bench import GROUPS, Group
from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.devices import DEVICE_NAMES
from finetune.errors import InterruptionError, UsageError
from finetune.files import escape_controls, read_json
from finetune.ownership import OwnFolder
from finetune.training.interruption import signal_of

if TYPE_CHECKING:
    from finetune.bench.results import BenchResults

EXAMPLES = """\b
Groups:
  mlp        a small network and larger ones, forward and backward
  inference  BERT-base on questions, batch sizes 1 to 256
  training   BERT-base and DistilBERT, as published and as in a run
  apple      ResNet-50, BERT-base and VGG16, training and evaluation

\b
Examples:
  finetune bench                         all groups, every usable device
  finetune bench --quick                 a first impression
  finetune bench inference --device cpu --device mps
  finetune bench --model my_models:make  your own network
  finetune bench --contribute            results of the last bench, to share
"""
ALL = "all"


def run_bench(
    groups: Sequence[Group] = GROUPS,
    *,
    output_dir: str | Path = "bench",
    devices: Sequence[str] = (),
    model: str | None = None,
    data_dir: str | Path | None = None,
    quick: bool = False,
) -> "BenchResults":
    """Time workloads on devices. Write JSON and a page, even if the user interrupts the benchmark.

    Args:
        output_dir: Folder for bench.json and bench.html: new, empty, or from an earlier benchmark.
        model: Time your own network: MODULE:FUNCTION, which returns a module and a batch.
        data_dir: Folder with the raw TREC files, to use instead of the bundled questions.
        quick: Time fewer workloads and stop sooner.
    """
    folder = OwnFolder(Path(output_dir).expanduser(), "bench")
    folder.check()
    from finetune.bench import workloads
    from finetune.bench.results import BenchResults
    from finetune.devices.host import cpu_name
    from finetune.devices.select import select_device, usable_devices
    from finetune.report.page import render_bench
    from finetune.runs.manifest import package_versions

    names = [name for name in dict.fromkeys(devices) if name != "auto"]
    chosen = [select_device(name) for name in names] or [*usable_devices()]
    lengths = workloads.read_lengths(Path(data_dir) if data_dir else None)
    timed = workloads.list_workloads(groups, model=model, lengths=lengths, is_quick=quick)
    limits = workloads.QUICK if quick else workloads.FULL
    results = BenchResults(
        machine={
            "cpu": cpu_name(),
            "platform": platform.platform(),
            "devices": {device.name: device.description for device in chosen},
            "versions": {"python": platform.python_version()} | package_versions(),
        },
        texts="TREC" if data_dir else "questions",
        is_quick=quick,
        is_complete=False,
        rows=[],
    )

    earlier = folder.path / "bench.json"
    has_complete = earlier.is_file() and read_json(earlier)["is_complete"]

    def write() -> None:
        # Only complete results replace complete results.
        if results.is_complete or (results.rows and not has_complete):
            folder.write_all({"bench.json": results.to_json(), "bench.html": render_bench(results)})

    try:
        for rows in workloads.measure(timed, chosen, limits):
            results = replace(results, rows=rows)
            write()  # a device may end the process
        results = replace(results, is_complete=True)
    except KeyboardInterrupt as stop:
        message, remedy = "the benchmark was stopped early", "run the command again"
        if has_complete:
            message = f"{message}, so {output_dir} keeps the earlier results"
        elif results.rows:
            remedy = f"see the results so far in {output_dir}, or {remedy}"
        signal_number = signal_of(stop)
        raise InterruptionError(message, remedy=remedy, signal_number=signal_number) from None
    finally:
        write()
    return results


@click.command(epilog=EXAMPLES)
@click.argument("group", required=False, type=click.Choice((*GROUPS, ALL)))
@click.option(
    "--device",
    "devices",
    type=click.Choice(DEVICE_NAMES),
    multiple=True,
    help="Device to time; can be repeated. Default: all usable devices.",
)
@flags.options_of(run_bench, "devices")
@click.option(
    "--contribute",
    is_flag=True,
    help="Print the results of the last bench as rows for finetune/bench/published.yaml.",
)
@flags.with_display
def command(*, group: str | None, contribute: bool, display: flags.Display, **options: Any) -> None:
    """Time the devices of this machine on published workloads.

    Published results for the same workloads are shown next to the results of this machine. Without
    a group, all groups are timed or, with --model, only the model.
    """
    if contribute:
        _show_contribution(Path(options["output_dir"]).expanduser())
        return
    is_all = group == ALL or (group is None and options["model"] is None)
    chosen = [name for name in GROUPS if is_all or name == group]
    folder = options["output_dir"]
    display.run(run_bench, lambda results: _show(results, folder=folder), groups=chosen, **options)


def _show_contribution(folder: Path) -> None:
    import yaml

    from finetune.bench.results import rows_to_contribute

    try:
        rows = rows_to_contribute(read_json(folder / "bench.json"))
    except FileNotFoundError as error:
        raise UsageError(
            f"no benchmark results in {folder}", remedy="run finetune bench first"
        ) from error
    click.echo("# Replace YOUR NAME, and open a pull request with docs/bench/README.md.")
    for row in rows:
        line = yaml.safe_dump([row], default_flow_style=None, width=1000, allow_unicode=True)
        click.echo(escape_controls(line.rstrip()))


def _show(results: "BenchResults", *, folder: str) -> None:
    from finetune.bench.results import tabulate

    for table in tabulate(results):
        show_lines(table.title, "")
        show_table(table.columns, table.rows, numbers=table.columns[table.text_columns :])
        show_lines(*(f"- {remark}" for remark in table.note.splitlines()))
    if failed := sum(not row.seconds for row in results.rows):
        show_lines(f"{failed} of {len(results.rows)} rows have no timing; the notes say why")
    show_lines(f"results and page: {folder}")
