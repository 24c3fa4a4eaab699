"""``finetune data audit``: which labels may be wrong, what repeats, and whether it is enough."""

import csv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import shorten, show_lines, show_table
from finetune.errors import DataError, RunFolderNotEmpty
from finetune.events import Emit
from finetune.ownership import OwnFolder
from finetune.runs.folder import FoldsFolder, find_several

if TYPE_CHECKING:
    from finetune.audit.audit import Audit

AUDITS_FOLDER = Path("audits")
WORST = 10
EXAMPLES = """\b
Examples:
  finetune data audit reviews.csv --model minilm
  finetune data audit runs/reviews-minilm-full      after run --folds: sharper
  finetune run --data reviews.csv --corrections audits/reviews/suspects.csv
"""
MODEL_OPTIONS = ("model", "revision", "max_length", "pooling", "device", "precision", "cache_dir")


def audit_data(
    *,
    file: str | None,
    output_dir: Path | None,
    folds: int,
    unlabelled: Path | None,
    batch: int,
    batches: int,
    emit: Emit,
    **options: Any,
) -> "Audit":
    """Audit data, with the out-of-fold predictions of a cross-validation if that is named."""
    from finetune.audit.audit import audit
    from finetune.commands.init import guess_options
    from finetune.data.load import source_name
    from finetune.report.audit import SUSPECTS, files_of

    several = None if file is None else find_several(Path(file).expanduser())
    out_of_fold = several.path if isinstance(several, FoldsFolder) else None
    if several is not None and out_of_fold is not None:
        file = str(several.run(several.numbers[0]).path)
    loaded = flags.load(file=file, **options)
    with suppress(DataError):  # of a table without labels
        loaded = guess_options(loaded, emit=emit)
    config = loaded.config
    folder = OwnFolder(output_dir or AUDITS_FOLDER / source_name(config.data.data), "audit")
    folder.check()
    _check_undecided(folder.path / SUSPECTS)
    found = audit(
        config, folds=folds, out_of_fold=out_of_fold, unlabelled=unlabelled, batch=batch,
        batches=batches, emit=emit,
    )  # fmt: skip
    folder.write_all(files_of(found, batch=batch))
    return replace(found, folder=str(folder.path))


def _check_undecided(suspects: Path) -> None:
    """Make sure that no decisions would be lost."""
    if suspects.is_file():
        with suspects.open(newline="", encoding="utf-8", errors="replace") as file:
            if any(row.get("decision") for row in csv.DictReader(file)):
                raise RunFolderNotEmpty(
                    f"{suspects} has decisions, which another audit would replace",
                    remedy="choose another folder with --output-dir",
                )


@click.command("audit", cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@click.option(
    "--output-dir", type=flags.PATH, help="Folder to write.  [default: audits/ and the name]"
)
@click.option(
    "--folds",
    type=click.IntRange(2, 100),
    default=5,
    help="Parts, each predicted by heads that saw the others.  [default: 5]",
)
@click.option("--unlabelled", type=flags.PATH, help="File of texts, to choose which to label next.")
@click.option(
    "--batch", type=click.IntRange(1), default=50, help="Texts to label at a time.  [default: 50]"
)
@click.option(
    "--batches", type=click.IntRange(1), default=5, help="Batches to choose.  [default: 5]"
)
@flags.chosen_options(*MODEL_OPTIONS, sections=("data",))
@flags.with_display
def command(*, display: flags.Display, **options: Any) -> None:
    """Find labels that may be wrong, classes to merge, near duplicates, and rows unlike the rest.

    FILE is what finetune run takes: a table, a configuration, a run.

    Also whether more rows would help, and which texts to label next. Heads on the frozen encoder
    predict each row without having seen it; after run --folds, its models too.
    """
    display.run(audit_data, _show, **options)


def _show(found: "Audit") -> None:
    from finetune.report.audit import cell_of, summarize

    show_lines(f"{found.sampled:,} rows of {found.data}, {len(found.classes)} classes")
    table = summarize(found)
    show_table(table.columns, table.rows, numbers=("rows",))
    if found.suspects:
        show_lines("labels that are most likely wrong", "")
        names = ("row", "text", "label", "suggested", "loss")
        rows = [[shorten(cell_of(one[name])) for name in names] for one in found.suspects]
        show_table(names, rows[:WORST], numbers=("row", "loss"))
    for merge in found.merges[:WORST]:
        show_lines(f"{merge['label']!r} may be {merge['into']!r}: {merge['why']}")
    show_lines(*found.notes, f"written: {found.folder}")
