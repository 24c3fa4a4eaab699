"""``finetune predict``."""

import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, zip_longest
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
from finetune.errors import DataError, DataUnreadable, UsageError
from finetune.escaping import escape_controls, escape_line
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from finetune.evaluation.answer_file import Write
    from finetune.runs.confidences import ConfidenceLimits
    from finetune.tasks.base import Answer, Task


# Within a piece, texts of like length share a batch. The first is small, so that answers come soon.
FIRST_TEXTS = 16
TEXTS_A_PIECE = 1_024
# Of long texts fewer, so that memory does not grow with them.
CHARACTERS_A_PIECE = 2**21


def predict(
    run: str | Path,
    texts: Sequence[str | tuple[str, str]],
    *,
    device: DeviceName = "auto",
    all_scores: bool = False,
    min_confidence: float | None = None,
    target_precision: float | None = None,
    emit: Emit = ignore,
) -> "list[Answer]":
    """Classify texts, as ``finetune predict`` does.

    Args:
        run: The run folder.
        texts: In any number, pairs for a model of pairs; the answers have their order.
        device: ``auto``, ``mps``, ``cpu`` or ``cuda``.
        all_scores: Give the probability of each class, not only that of the best.
        min_confidence: Answers of a lower probability, in 0..1, have the label None.
        target_precision: So have answers below the probability from which on, on the run's
            validation rows, answers of their class have at least this precision, in 0..1.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        UsageError: If what is given is no list of texts, both limits are given, the model is for
            something else than one label a text, or the run has no validation rows for a target.
        FinetuneError: With an exit code and a remedy.
    """
    _check_is_list(texts)
    from finetune.runs.confidences import ConfidenceLimits

    limits = ConfidenceLimits(min_confidence, target_precision)
    rows = [[_as_row(text) for text in texts]]
    pieces = predict_stream(
        run, rows, device=device, all_scores=all_scores, limits=limits, emit=emit
    )
    return [answer for piece in pieces for answer in piece]


def _check_is_list(texts: object) -> None:
    # A table of pandas yields the names of its columns.
    if (
        not isinstance(texts, Iterable)
        or isinstance(texts, str | bytes | Mapping)
        or getattr(texts, "ndim", 1) != 1
    ):
        raise UsageError(
            f"{type(texts).__name__} was given in place of a list of texts",
            remedy="write [text], or of a table one column, such as table['text']",
        )


def _as_row(text: object) -> Row:
    match text:
        case str(first):
            row = Row(first, pair=None)
        case (str(first), str(second)):
            row = Row(first, pair=second)
        case _:
            raise UsageError(
                f"{reprlib.repr(text)} is not a text",
                remedy="give texts, or pairs of texts as tuples",
            )
    try:
        f"{row.text}{row.pair}".encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{reprlib.repr(text)} can't be written as UTF-8: {error.reason}",
            remedy="read the texts with their encoding, and without errors='surrogateescape'",
        ) from error
    return row


def predict_stream(
    run: str | Path,
    rows: Iterable[Sequence[Row]],
    *,
    device: DeviceName = "auto",
    all_scores: bool = False,
    limits: "ConfidenceLimits | None" = None,
    emit: Emit = ignore,
) -> "Iterator[list[Answer]]":
    """Return the answers to rows piece by piece, in their order, while the rows are read.

    The arguments are those of :func:`predict`; ``rows`` yields as many as there are at a time.
    """
    folder = open_run_folder(Path(run))
    pieces = _answer(folder, rows, device=device, all_scores=all_scores, emit=emit)
    if limits is None or not limits.are_given:
        return pieces
    from finetune.runs.confidences import find_lowest_probabilities

    task = folder.read_task()
    lowest = find_lowest_probabilities(folder, task, limits, emit=emit)
    return _withhold(pieces, task, lowest, emit=emit)


def _withhold(
    pieces: "Iterable[Sequence[Answer]]", task: "Task", lowest: Mapping[str, float], *, emit: Emit
) -> "Iterator[list[Answer]]":
    """Yield the answers, those below the lowest probability of their class without a label."""
    texts = abstained = 0
    for answers in pieces:
        kept = task.abstain(answers, lowest)
        texts += len(kept)
        abstained += sum(answer.result["label"] is None for answer in kept)
        yield kept
    emit(Info(f"{abstained:,} of {texts:,} texts have no prediction"))


def _answer(
    folder: RunFolder,
    rows: Iterable[Sequence[Row]],
    *,
    device: DeviceName,
    all_scores: bool,
    emit: Emit,
) -> "Iterator[list[Answer]]":
    from finetune.distributed.processes import join_processes
    from finetune.runs.trained import TrainedModel

    model = TrainedModel.load(folder, device=device, emit=emit, processes=join_processes())
    count = FIRST_TEXTS
    for given in rows:
        start = 0
        while piece := _few_characters(given[start : start + count]):
            _check_pairs(piece, reads_pairs=model.reads_pairs)
            texts, pairs = [row.text for row in piece], [row.pair or "" for row in piece]
            answers = model.answer(
                texts, pairs if model.reads_pairs else None, all_scores=all_scores
            )
            yield [
                replace(answer, text_pair=row.pair, columns=row.columns)
                for answer, row in zip(answers, piece, strict=True)
            ]
            start += len(piece)
            count = min(2 * count, TEXTS_A_PIECE)


def _check_pairs(rows: Sequence[Row], *, reads_pairs: bool) -> None:
    """Make sure that each row has as many texts as the model reads."""
    for row in rows:
        if reads_pairs and row.pair is None:
            raise UsageError(
                f"the model reads pairs of texts, and {row.text[:60]!r} has no second one",
                remedy="add --text-pair for each text, or name a table with --file",
            )
        if row.pair is not None and not reads_pairs:
            raise UsageError(
                f"the model reads single texts, and {row.text[:60]!r} has a second one",
                remedy="leave out --text-pair",
            )


def _few_characters(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the first of some rows, with about ``CHARACTERS_A_PIECE`` in all, or one row."""
    ends = accumulate(len(row.text) for row in rows)
    return rows[: max(1, sum(end <= CHARACTERS_A_PIECE for end in ends))]


def read_texts(
    run: str | Path,
    file: Path,
    *,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    encoding: str | None = None,
    as_lines: bool = False,
    emit: Emit = ignore,
) -> Iterator[list[Row]]:
    """Return the texts of a file for :func:`predict_stream`, as they are read.

    Args:
        run: The run folder; a table that has its column of texts is read from that one.
        file: A table (csv, tsv, jsonl or parquet), or a file with one text per line.
        text_column: Another column.
        text_pair_column: Another column of second texts.
        encoding: Of the file; detected by default.
        as_lines: Read the lines of a table as texts.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        DataError: If the file or the column is not there, or can't be read.
    """
    folder = open_run_folder(Path(run))
    from finetune.data.source import DataOptions
    from finetune.data.stream import read_rows
    from finetune.runs.manifest import Manifest

    saved, manifest = folder.read_config().data, Manifest.read(folder.manifest_file)
    options = DataOptions(
        str(file),
        saved.label,
        text_column=text_column or saved.text_column,
        text_pair_column=text_pair_column or saved.text_pair_column,
        label_column=saved.label_column,
        encoding=encoding,
        header=saved.header,
        earlier_columns=manifest.columns,
    )
    return read_rows(file, options, as_lines=as_lines, reads_pairs=manifest.reads_pairs, emit=emit)


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
