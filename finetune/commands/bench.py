"""``finetune bench``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.bench.results import GROUPS
from finetune.commands.console import show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing
from finetune.devices.names import DEVICE_NAMES

if TYPE_CHECKING:
    from finetune.bench.results import BenchResults, BenchTable

EXAMPLES = """\b
Groups:
  mlp        a small network and larger ones, forward and backward
  inference  BERT-base on questions, batches of 1 to 256
  training   BERT-base on 1,000 questions, padded to 512 tokens and less
  apple      ResNet-50, BERT-base and VGG16, training and evaluation

\b
Examples:
  finetune bench                         all groups, every device that works
  finetune bench --quick                 few rows of each, in under a minute
  finetune bench inference --devices cpu,mps
  finetune bench --model my_models:make  a network of your own
  finetune bench --compare mine/bench.json yours/bench.json
"""
ALL = "all"


def _split_devices(_: click.Context, __: click.Parameter, names: str | None) -> list[str]:
    given = [name.strip() for name in (names or "").split(",") if name.strip()]
    if unknown := set(given) - set(DEVICE_NAMES) | ({"auto"} & set(given)):
        raise click.BadParameter(f"there is no device {', '.join(sorted(unknown))}")
    return given


@click.command(epilog=EXAMPLES)
@click.argument("group", required=False, type=click.Choice((*GROUPS, ALL)))
@click.option("--devices", callback=_split_devices, help="Such as cpu,mps. Default: all that work.")
@click.option("--quick", is_flag=True, help="Time few rows, and not for long.")
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Time a network of your own: a function that returns a module and a batch.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Folder with TREC's raw file. Default: the questions of the package.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A B",
    help="Set two bench.json side by side; nothing is timed.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("runs/bench"),
    help="Folder of bench.json, bench.html and pictures.",
)
@output_options
def command(
    *,
    group: str | None,
    devices: list[str],
    quick: bool,
    model: str | None,
    data_dir: Path | None,
    compare: tuple[Path, Path] | None,
    output_dir: Path,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
) -> None:
    """Time this machine's devices at published workloads, side by side.

    Without a group: all of them or, with --model, that alone.
    """
    if compare:
        _compare(*compare, as_json=as_json)
        return
    is_all = group == ALL or (group is None and model is None)
    chosen = [one for one in GROUPS if is_all or one == group]
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.api.bench import run_bench

        results = run_bench(
            chosen,
            output_dir=output_dir,
            devices=devices,
            model=model,
            data_dir=data_dir,
            quick=quick,
            emit=emit,
        )
    if as_json:
        show_json(results.to_json())
    else:
        _show(results, folder=output_dir)


def _compare(one: Path, other: Path, *, as_json: bool) -> None:
    from finetune.bench.results import SCHEMA_VERSION, read_results
    from finetune.bench.tables import compare, compare_speeds

    results, others = read_results(one), read_results(other)
    if as_json:
        rows = list(compare_speeds(results, others))
        show_json({"schema_version": SCHEMA_VERSION, "A": str(one), "B": str(other), "rows": rows})
        return
    table = compare(results, others)
    for name, path, side in (("A", one, results), ("B", other, others)):
        devices = ", ".join(side.machine.devices.values())
        show_lines(f"{name}: {path}: {side.machine.cpu}, {devices}")
    _show_table(table)


def _show(results: "BenchResults", *, folder: Path) -> None:
    from finetune.bench.tables import tabulate

    for table in tabulate(results):
        _show_table(table)
    if failed := sum(not row.seconds for row in results.rows):
        show_lines(f"{failed} of {len(results.rows)} rows have no timing: see the notes")
    show_lines(f"results and page: {folder}")


def _show_table(table: "BenchTable") -> None:
    notes = [f"({table.source})"] if table.source else [f"- {one}" for one in table.remarks]
    show_lines(table.title + (" (published)" if table.source else ""), "")
    if table.rows:
        show_table(table.columns, table.rows, numbers=table.columns[table.text_columns :])
    show_lines(*notes)
