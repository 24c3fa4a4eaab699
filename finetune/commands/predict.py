"""``finetune predict``."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import show_table
from finetune.commands.options import (
    device_option,
    output_options,
    text_column_option,
    text_pair_column_option,
)
from finetune.commands.progress import showing
from finetune.data.lines import Row, read_lines
from finetune.devices.names import DeviceName
from finetune.distributed.launch import read_launch
from finetune.errors import DataUnreadable, UsageError
from finetune.escaping import escape_controls, escape_line
from finetune.events import Emit, Info
from finetune.runs.folder import open_run_folder

if TYPE_CHECKING:
    from finetune.evaluation.answer_file import Write
    from finetune.tasks.base import Answer

WITHOUT_LINE_ENDS = str.maketrans("\t\r\n", "   ")

EXAMPLES = """\b
Examples:
  finetune predict runs/demo "Who wrote Faust?"
  finetune predict runs/demo --file new.csv --output answers.csv
  cat questions.txt | finetune predict runs/demo --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    help="Table (csv, tsv, jsonl, parquet) or file with one text per line; - for standard input.",
)
@click.option("--text-pair", "pairs", multiple=True, help="Second text of a pair, for each TEXT.")
@text_column_option
@text_pair_column_option
@click.option("--lines", "as_lines", is_flag=True, help="Read the lines of a table as texts.")
@click.option("--encoding", help="Encoding of the texts.  [default: detected]")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Write to this csv, jsonl or parquet file."
)
@click.option("--all-scores", is_flag=True, help="Give the probability of each class.")
@click.option(
    "--min-confidence",
    type=float,
    help="Abstain on texts whose probability is lower, such as 0.9.",
)
@click.option(
    "--target-precision",
    type=float,
    help="Abstain on texts below the probability from which on, on the run's validation "
    "rows, answers of their class have this precision, such as 0.95.",
)
@device_option
@output_options
def command(
    run: Path,
    texts: tuple[str, ...],
    *,
    pairs: tuple[str, ...],
    file: Path | None,
    output: Path | None,
    all_scores: bool,
    min_confidence: float | None,
    target_precision: float | None,
    device: DeviceName,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **reading: Any,
) -> None:
    """Classify texts with the model in the run folder RUN.

    The texts are arguments, rows of a table, or lines of a file or of standard input, where blank
    ones are skipped. They are classified as they are read, in any number. The output has their
    order: lines, or with --json one object per line, with the other columns of the table. The label
    of a text that has no prediction is empty, in JSON null.
    """
    if texts and file is not None:
        raise UsageError("both texts and --file were given", remedy="give one of them")
    if pairs and len(pairs) != len(texts):
        raise UsageError(
            f"{len(pairs)} --text-pair for {len(texts)} texts", remedy="give one for each text"
        )
    open_run_folder(run)
    # A moving line would stand beside what is typed.
    is_typed = not texts and file in (None, Path("-"))
    with ExitStack() as stack, ExitStack() as view:
        emit = view.enter_context(showing(quiet=quiet, no_progress=no_progress or is_typed))
        if is_typed and sys.stdin.isatty():
            emit(Info("classifies each line that is typed; Ctrl-D ends"))
        write: Write = _show_json if as_json else _Lines().show
        if output is not None:
            from finetune.evaluation.answer_file import answer_file, check_output

            check_output(output, source=file)
        rows = _rows(run, (texts, pairs), file, reading, emit)
        from finetune.api.predict import predict_stream
        from finetune.runs.confidences import ConfidenceLimits

        limits = ConfidenceLimits(min_confidence, target_precision)
        pieces = predict_stream(
            run, rows, device=device, all_scores=all_scores, limits=limits, emit=emit
        )
        if output is not None and read_launch().is_main:
            write = stack.enter_context(answer_file(output))
        for answers in pieces:
            view.close()  # nor may it stand between the answers
            write(answers)


def _rows(
    run: Path,
    given: tuple[Sequence[str], Sequence[str]],
    file: Path | None,
    reading: Mapping[str, Any],
    emit: Emit,
) -> Iterable[Sequence[Row]]:
    texts, pairs = (list(map(_check_encoding, one)) for one in given)
    if texts:
        return [[Row(text, pair=pair) for text, pair in zip_longest(texts, pairs)]]
    if file is None or file == Path("-"):
        if read_launch().world_size > 1:
            raise UsageError(
                "several processes can't share standard input", remedy="name a file with --file"
            )
        return read_lines(sys.stdin.buffer, name="standard input", encoding=reading["encoding"])
    from finetune.api.predict import read_texts

    return read_texts(run, file, **reading, emit=emit)


def _check_encoding(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataUnreadable(
            f"the text {text!r} is not UTF-8", remedy="set the terminal's encoding to UTF-8"
        ) from error
    return text


def _show_json(answers: "Sequence[Answer]") -> None:
    from finetune.evaluation.answer_file import json_line

    click.echo(escape_controls("\n".join(map(json_line, answers))))


class _Lines:
    """Shows answers in columns: aligned on a terminal, elsewhere between tabs."""

    def __init__(self) -> None:
        self._has_titles = False

    def show(self, answers: "Sequence[Answer]") -> None:
        rows = [_cells(answer) for answer in answers]
        titles = [] if self._has_titles else [title for title, _ in rows[0]]
        cells_of_rows = [[cell for _, cell in row] for row in rows]
        self._has_titles = True
        if sys.stdout.isatty():
            show_table(titles or [""] * len(rows[0]), cells_of_rows)
        else:
            lines = [titles, *cells_of_rows] if titles else cells_of_rows
            click.echo("\n".join("\t".join(map(escape_line, line)) for line in lines))


def _cells(answer: "Answer") -> list[tuple[str, str]]:
    """Return an answer's titles and cells; numbers of all classes stand for that of the best."""
    words = [
        (name, one if isinstance(one, str) else "|".join(one or ()))
        for name, one in answer.result.items()
        if isinstance(one, str | list | None)
    ]
    numbers = {name: one for name, one in answer.result.items() if isinstance(one, float)}
    for scores in (one for one in answer.result.values() if isinstance(one, Mapping)):
        numbers = dict(scores)
    cells = ((name, f"{number:.3f}") for name, number in numbers.items())
    texts = [("text", answer.text), ("text_pair", answer.text_pair)]
    shown = ((name, text.translate(WITHOUT_LINE_ENDS)) for name, text in texts if text is not None)
    return [*words, *cells, *shown]
