"""``finetune evaluate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click

from finetune.commands.console import show_json, show_scores
from finetune.commands.options import (
    completes,
    device_option,
    given,
    output_options,
    text_column_option,
    text_pair_column_option,
)
from finetune.commands.progress import showing
from finetune.config.load import refuse_table
from finetune.config.options import ColumnOptions
from finetune.devices.names import DeviceName
from finetune.errors import UsageError
from finetune.events import Emit, ignore
from finetune.runs.folder import open_run_folder

if TYPE_CHECKING:
    from finetune.tasks.base import Scores


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """A run's model on a split.

    Args:
        split: Name of the split, or the file that was scored.
        scores: The metrics.
    """

    split: str
    scores: "Scores"

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune evaluate --json`` prints."""
        return {"schema_version": SCHEMA_VERSION, "split": self.split, **self.scores.to_json()}


def evaluate(
    run: str | Path,
    *,
    split: str | None = None,
    data: str | Path | None = None,
    device: DeviceName = "auto",
    emit: Emit = ignore,
    **columns: Unpack[ColumnOptions],
) -> Evaluation:
    """Evaluate a run's model, as ``finetune evaluate`` does.

    Args:
        run: The run folder.
        split: ``test``, the default, ``validation`` or ``train`` of the data that the run was made
            from.
        data: Other data to score, all rows of it, in place of a split of the run.
        device: ``auto``, ``mps``, ``cpu`` or ``cuda``.
        emit: Is called with the events of ``finetune.events``.
        columns: Of the other data, where they are not those of the run.

    Raises:
        UsageError: If both a split and other data are given, or columns without other data.
        DataDiffers: If the run's data is no longer what the run was made from.
        FinetuneError: With an exit code and a remedy.
    """
    for option in columns:
        if option not in ColumnOptions.__annotations__:
            raise TypeError(f"evaluate() got an unexpected keyword argument {option!r}")
    if split is not None and data is not None:
        raise UsageError(
            "both --split and --data were given", remedy="leave out --split to score other data"
        )
    if columns and data is None:
        option = next(iter(columns)).replace("_", "-")
        raise UsageError(f"--{option} is of other data", remedy="add --data, or leave it out")
    refuse_table(data)
    folder = open_run_folder(Path(run))
    from finetune.runs.evaluate import evaluate_data, evaluate_split

    if data is None:
        split = split or "test"
        scores = evaluate_split(folder, split, device=device, emit=emit)
        return Evaluation(split, scores)
    scores = evaluate_data(folder, str(data), columns, device=device, emit=emit)
    return Evaluation(str(data), scores)


EXAMPLES = """\b
Examples:
  finetune evaluate runs/demo                    its test split
  finetune evaluate runs/demo --data later.csv   other rows and their labels
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--split",
    type=click.Choice(["test", "validation", "train"]),
    help="Split to evaluate on.  [default: test]",
)
@click.option(
    "--data",
    metavar="SOURCE",
    shell_complete=completes("file"),
    help="Other data to score, all rows of it, such as a table.",
)
@text_column_option
@text_pair_column_option
@click.option("--label-column", help="Column of the labels.  [default: the run's]")
@device_option
@output_options
def command(
    run: Path,
    *,
    split: str | None,
    data: str | None,
    device: DeviceName,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **columns: str | None,
) -> None:
    """Evaluate the model in the run folder RUN on a split of its data, or on other data."""
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        found = evaluate(run, split=split, data=data, device=device, emit=emit, **given(columns))
    if as_json:
        show_json(found.to_json())
    else:
        where = found.split if data else f"{found.split} split"
        show_scores(f"{where}, {found.scores.samples:,} rows", found.scores)
