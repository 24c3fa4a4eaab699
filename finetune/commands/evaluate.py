"""``finetune evaluate``: computes the metrics of a trained model on a split or on new data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_scores
from finetune.config.schema import flag_of
from finetune.devices import DeviceName, Runtime
from finetune.errors import UsageError
from finetune.runs.folder import open_run_folder
from finetune.tasks.tables import DisplayMixin

if TYPE_CHECKING:
    from finetune.tasks.scores import Scores

Split = Literal["test", "validation", "train"]
SPLITS = get_args(Split)
EXAMPLES = """\b
Examples:
  finetune evaluate runs/demo           the test split of the run
  finetune evaluate latest later.csv    another table with labels
"""


@dataclass(frozen=True, repr=False)
class Evaluation(DisplayMixin):
    """Metrics of a trained model on a split or on new data.

    If some rows were in the training split, ``unseen`` contains the metrics of the other rows.
    """

    split: str
    scores: "Scores"
    rows_in_training: int
    unseen: "Scores | None"

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics over all rows, and over the rows that were not in training."""
        scores = {self.split: self.scores, f"{self.split}, not in training": self.unseen}
        return [{"rows": name, **part.records()[0]} for name, part in scores.items() if part]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``finetune evaluate``."""
        unseen = self.unseen and self.unseen.to_json()
        more = {"rows_in_training": self.rows_in_training, "unseen": unseen}
        return {"split": self.split, **self.scores.to_json(), **more}


def evaluate(
    run: str | Path,
    *,
    split: Split | None = None,
    data: str | Path | None = None,
    table: str | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    encoding: str | None = None,
    evaluate_metric: str | None = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    device: DeviceName = "auto",
    runtime: Runtime = "auto",
) -> Evaluation:
    """Evaluate the model of a run, like ``finetune evaluate``.

    Args:
        run: The run folder or, with data, a bundle.
        split: Split of the run to evaluate on. Default: test.
        data: New data to evaluate on, such as a table. All of its rows are used.
        table: Table to read if --data contains several.
        text_column: Text column of --data. Default: as in the run.
        text_pair_column: Column with the second text in --data. Default: as in the run.
        label_column: Label column of --data. Default: as in the run.
        encoding: Encoding of --data. Default: detected.
        evaluate_metric: Another metric, from the `evaluate` library: a folder with its code, or a
            Hub ID. The metric code runs on this machine.
        compute_metrics: Function that returns more metrics, as for ``transformers.Trainer``.
        device: Device to use.
        runtime: torch, or onnx or onnx-int8 on the CPU, after finetune export onnx --verify. auto
            uses onnx if the export is verified, except for a run in bf16 or with a GPU.
        emit: Receives the events of ``finetune.events``.
    """
    columns = flags.without_none({"text_column": text_column, "text_pair_column": text_pair_column})
    columns |= flags.without_none(
        {"label_column": label_column, "table": table, "encoding": encoding}
    )
    if split is not None and data is not None:
        raise UsageError(
            "--split and --data can't be combined", remedy="drop --split to evaluate on new data"
        )
    if columns and data is None:
        flag = flag_of(next(iter(columns)))
        raise UsageError(f"{flag} only applies to new data", remedy=f"add a FILE, or drop {flag}")
    folder = open_run_folder(Path(run), accepts_bundle=True)
    from finetune.data import is_waiting
    from finetune.runs.evaluate import evaluate_rows, load_other_data, load_split
    from finetune.tasks.metrics import computing

    name: str = split or "test"
    if data is None:
        rows = load_split(folder, name)
    else:
        name = str(data)
        rows = load_other_data(folder, name, columns)
        # A folder can have the same name as one of the splits.
        name = f"./{name}" if name in SPLITS else "the table" if is_waiting(name) else name
    with computing(compute_metrics):
        measured = evaluate_rows(
            folder, rows, name, device=device, runtime=runtime, metric=evaluate_metric
        )
    return Evaluation(name, *measured)


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.argument("file", required=False, metavar="[FILE]")
@flags.options_of(evaluate, "compute_metrics")
@flags.with_display
def command(*, file: str | None, data: str | None, display: flags.Display, **options: Any) -> None:
    """Evaluate the model in the run folder RUN on a split of its data, or on FILE.

    If some rows of FILE were in training, the main metric is also reported without them.
    """
    if file and data:
        message = f"the data was set twice: {file} and --data {data}"
        raise UsageError(message, remedy="drop one of them")
    options["data"] = file or data
    display.run(evaluate, _show, **options)


def _show(result: Evaluation) -> None:
    is_split, scores, trained = result.split in SPLITS, result.scores, result.rows_in_training
    where = f"{result.split} split" if is_split else result.split
    show_scores(f"{where}, {scores.samples:,} rows", scores)
    show_lines(scores.describe(f"{result.split} rows" if is_split else "rows"))
    if trained and result.unseen:
        unseen = result.unseen.describe("rows")
        show_lines(f"{trained:,} of these rows were in training. Without them: {unseen}")
    elif trained:
        show_lines("all of these rows were in training")
