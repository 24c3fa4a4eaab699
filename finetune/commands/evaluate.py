"""``finetune evaluate``: a run's model scored on a split of its data, or on other data."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_scores
from finetune.config.schema import flag_of
from finetune.devices import DeviceName
from finetune.errors import UsageError
from finetune.runs.folder import open_run_folder
from finetune.tasks.shown import DisplayMixin

if TYPE_CHECKING:
    from finetune.tasks.scores import Scores

SPLITS = ("test", "validation", "train")
EXAMPLES = """\b
Examples:
  finetune evaluate runs/demo           its test split
  finetune evaluate latest later.csv    other rows and their labels
"""


@dataclass(frozen=True, repr=False)
class Evaluation(DisplayMixin):
    """Metrics of a run's model on a split, or on the file or data set named in its place.

    Of other data, ``unseen`` are those without the rows that were in training, if only some were.
    """

    split: str
    scores: "Scores"
    rows_in_training: int
    unseen: "Scores | None"

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of all rows, and of those that were not in training."""
        scores = {self.split: self.scores, f"{self.split}, not in training": self.unseen}
        return [{"rows": name, **own.records()[0]} for name, own in scores.items() if own]

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune evaluate --json`` prints."""
        found = {"split": self.split, **self.scores.to_json()}
        unseen = self.unseen and self.unseen.to_json()
        return {**found, "rows_in_training": self.rows_in_training, "unseen": unseen}


def evaluate(
    run: str | Path,
    *,
    split: str | None = None,
    data: str | Path | None = None,
    table: str | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    encoding: str | None = None,
    evaluate_metric: str | None = None,
    device: DeviceName = "auto",
) -> Evaluation:
    """Evaluate a run's model, as ``finetune evaluate`` does.

    Args:
        run: The run folder.
        split: ``test``, the default, ``validation`` or ``train`` of the run's data.
        data: Other data to score, all rows of it, in place of a split of the run.
        table: The table to read of several in the other data.
        text_column: Of the other data, if it is not named as in the run's data.
        encoding: Of the other data; None detects it.
        evaluate_metric: Another metric, of the library ``evaluate``: a folder with its code, or an
            id of the Hub. The code runs here.
        emit: Receives the events of ``finetune.events``.
    """
    columns = flags.given({"text_column": text_column, "text_pair_column": text_pair_column})
    columns |= flags.given({"label_column": label_column, "table": table, "encoding": encoding})
    if split is not None and data is not None:
        raise UsageError(
            "both --split and --data were given", remedy="leave out --split to score other data"
        )
    if columns and data is None:
        flag = flag_of(next(iter(columns)))
        raise UsageError(f"{flag} is of other data", remedy="add --data, or leave it out")
    folder = open_run_folder(Path(run))
    from finetune.data import is_waiting
    from finetune.runs.evaluate import evaluate_rows, load_other_data, load_split

    if data is None:
        name = split or "test"
        rows = load_split(folder, name)
    else:
        name = str(data)
        rows = load_other_data(folder, name, columns)
        # A folder may be called like a split, and is none.
        name = f"./{name}" if name in SPLITS else "the table" if is_waiting(name) else name
    found = evaluate_rows(folder, rows, name, device=device, metric=evaluate_metric)
    return Evaluation(name, *found)


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--split", type=click.Choice(SPLITS), help="Split to score.  [default: test]")
@click.option("--data", type=flags.NAME, help="Other data to score, such as a table.")
@flags.table_options
@click.option("--label-column", help="Column of the labels.  [default: the run's]")
@click.option(
    "--evaluate-metric",
    metavar="PATH_OR_ID",
    help="Another metric, of the library evaluate: a folder, or an id of the Hub. Its code runs.",
)
@flags.device_option
@flags.with_display
def command(*, file: str | None, data: str | None, display: flags.Display, **options: Any) -> None:
    """Evaluate the model in the run folder RUN on a split of its data, or on that in FILE."""
    if file and data:
        raise UsageError(f"{file} and --data {data} name two", remedy="leave one of them out")
    options["data"] = file or data
    display.run(evaluate, _show, **options)


def _show(found: Evaluation) -> None:
    where = f"{found.split} split" if found.split in SPLITS else found.split
    rows = f"{found.split} rows" if found.split in SPLITS else "rows"
    show_scores(f"{where}, {found.scores.samples:,} rows", found.scores)
    show_lines(found.scores.describe(rows))
    if found.rows_in_training:
        trained = f"{found.rows_in_training:,} of these rows were in training"
        unseen = found.unseen and found.unseen.describe("rows")
        show_lines(f"{trained}; without them: {unseen}" if unseen else f"{trained}, and no other")
