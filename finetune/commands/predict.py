"""``finetune predict``: texts classified with a run's model, as they are read."""

import os
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_table
from finetune.config.schema import Share
from finetune.data.stream import Row, read_lines, read_records
from finetune.devices import DeviceName
from finetune.errors import DataUnreadable, UsageError
from finetune.escaping import escape_controls, escape_line
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from finetune.runs.trained import TrainedModel
    from finetune.tasks.base import Prediction, Predictions

# The texts of a chunk are batched by length. The first chunk is small, so that predictions come
# soon; long texts make it smaller, so that memory does not grow with them.
FIRST_CHUNK_TEXTS = 16
MAX_CHUNK_TEXTS = 1_024
MAX_CHUNK_CHARACTERS = 2**21
WITHOUT_LINE_ENDS = str.maketrans("\t\r\n", "   ")
EXAMPLES = """\b
Examples:
  finetune predict runs/demo "Who wrote Faust?"
  finetune predict latest new.csv --output answers.csv
  cat questions.txt | finetune predict runs/demo --json
"""


def predict(
    run: str | Path,
    texts: Any,
    *,
    device: DeviceName = "auto",
    all_scores: bool = False,
    min_confidence: Share | None = None,
    target_precision: Share | None = None,
    emit: Emit = ignore,
) -> "Predictions":
    """Classify texts, as ``finetune predict`` does.

    Args:
        run: The run folder, or the results of a run.
        texts: A list or Series of texts, or of pairs for a model of pairs; or a table with the
            run's column of texts. The predictions have their order and number.
        all_scores: Give the probability of each class, not only that of the best.
        min_confidence: Give no label whose probability is lower, in 0..1, but None.
        target_precision: Abstain below the probability from which on, on the run's validation
            rows, predictions of the class have at least this precision, in 0..1.
        emit: Receives the events of ``finetune.events``.
    """
    return load(run, device=device, emit=emit).predict(
        texts, all_scores=all_scores, min_confidence=min_confidence,
        target_precision=target_precision, emit=emit,
    )  # fmt: skip


def load(run: str | Path, *, device: DeviceName = "auto", emit: Emit = ignore) -> "LoadedModel":
    """Load a run's model, to classify texts many times: ``load(run).predict(texts)``.

    Args:
        run: The run folder, or the results of a run.
        device: Where it computes.
        emit: Receives the events of ``finetune.events``.
    """
    folder = open_run_folder(Path(run))
    from finetune.runs.trained import TrainedModel

    return LoadedModel(folder, TrainedModel.load(folder, device=device, emit=emit))


@dataclass(frozen=True)
class LoadedModel:
    """A run's model in memory."""

    folder: RunFolder
    model: "TrainedModel" = field(repr=False)

    def predict(self, texts: Any, *, emit: Emit = ignore, **options: Any) -> "Predictions":
        """Classify texts, as ``finetune.predict`` does, with its options."""
        from finetune.data.in_memory import as_arrow, is_table
        from finetune.runs.evaluate import other_data
        from finetune.tasks.base import Predictions

        rows: Iterable[Sequence[Row]]
        is_list = isinstance(texts, list) and not any(isinstance(one, dict) for one in texts[:1])
        if is_table(texts) and not is_list:
            rows = read_records(
                iter([as_arrow(texts).to_pylist()]), other_data(self.folder, "", {}),
                name="the table", reads_pairs=self.model.reads_pairs, keeps_empty=True, emit=emit,
            )  # fmt: skip
        elif isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            kind = type(texts).__name__
            raise UsageError(f"a {kind} is no list of texts", remedy="write [text]")
        else:
            rows = [[_as_row(text) for text in texts]]
        return Predictions(chain.from_iterable(self.stream(rows, **options, emit=emit)))

    def stream(
        self, rows: Iterable[Sequence[Row]], *, all_scores: bool = False, emit: Emit, **limits: Any
    ) -> "Iterator[Sequence[Prediction]]":
        """Yield predictions in chunks, while ``rows`` yields as many as there are at a time."""
        from finetune.runs.inference import find_lowest_probabilities
        from finetune.tasks.base import abstain

        lowest = find_lowest_probabilities(self.folder, **limits, emit=emit)
        model, texts, abstained = self.model, 0, 0
        for chunk in _chunks(rows):
            for row in chunk:
                if (row.pair is not None) != model.reads_pairs:
                    kind = "pairs of texts" if model.reads_pairs else "single texts"
                    raise UsageError(
                        f"the model reads {kind}, and {row.text[:60]!r} is not one of them",
                        remedy="give --text-pair for each text of a pair, and of no other",
                    )
            pairs = [row.pair or "" for row in chunk] if model.reads_pairs else None
            predictions = model.predict([row.text for row in chunk], pairs, all_scores=all_scores)
            predictions = [
                replace(prediction, text_pair=row.pair, columns=row.columns)
                for prediction, row in zip(predictions, chunk, strict=True)
            ]
            if lowest is not None:
                predictions = abstain(predictions, lowest)
                abstained += sum(None in one.values.values() for one in predictions)
            texts += len(predictions)
            yield predictions
        if lowest is not None:
            emit(Info(f"{abstained:,} of {texts:,} texts have no prediction"))


def _chunks(rows: Iterable[Sequence[Row]]) -> Iterator[Sequence[Row]]:
    max_texts = FIRST_CHUNK_TEXTS
    for available in rows:
        while available:
            ends = accumulate(len(row.text) for row in available[:max_texts])
            count = max(1, sum(end <= MAX_CHUNK_CHARACTERS for end in ends))
            yield available[:count]
            available = available[count:]
            max_texts = min(2 * max_texts, MAX_CHUNK_TEXTS)


def _as_row(text: object) -> Row:
    match text:
        case str(first):
            row = Row(first)
        case (str(first), None | str() as second):
            row = Row(first, pair=second)
        case _:
            remedy = "give texts, or pairs of texts as tuples"
            raise UsageError(f"{reprlib.repr(text)} is not a text", remedy=remedy)
    try:
        f"{row.text}{row.pair}".encode()
    except UnicodeEncodeError as error:
        raise DataUnreadable(
            f"{reprlib.repr(text)} can't be written as UTF-8: {error.reason}",
            remedy="read texts with their encoding and without errors='surrogateescape'; set the "
            "terminal's encoding to UTF-8",
        ) from error
    return row


def read_texts(
    run: Path, file: Path, *, as_lines: bool = False, emit: Emit = ignore, **options: str | None
) -> Iterator[list[Row]]:
    """Return the rows of a table, or the lines of a file, as they are read.

    If a table has the run's columns of texts, they are read unless others are named.
    """
    folder = open_run_folder(run)
    from finetune.data.stream import read_rows
    from finetune.runs.evaluate import other_data
    from finetune.runs.manifest import Manifest

    data = other_data(folder, str(file), flags.given(options))
    reads_pairs = Manifest.read(folder).reads_pairs
    return read_rows(file, data, as_lines=as_lines, reads_pairs=reads_pairs, emit=emit)


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--data",
    "file",
    type=flags.PATH,
    help="Table (csv, tsv, jsonl, parquet) or file with one text per line; - for standard input.",
)
@click.option("--text-pair", "pairs", multiple=True, help="Second text of a pair, for each TEXT.")
@flags.table_options
@click.option("--lines", "as_lines", is_flag=True, help="Read the lines of a table as texts.")
@flags.output_file_option("Write to this csv, jsonl or parquet file.")
@click.option("--all-scores", is_flag=True, help="Give the probability of each class.")
@click.option(
    "--min-confidence",
    type=click.FloatRange(0, 1),
    help="Give no label whose probability is lower, such as 0.9.",
)
@click.option(
    "--target-precision",
    type=click.FloatRange(0, 1),
    help="Abstain on texts below the probability from which on, on the run's validation "
    "rows, predictions of their class have this precision, such as 0.95.",
)
@flags.device_option
@flags.with_display
def command(
    *,
    run: Path,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    file: Path | None,
    output: Path | None,
    overwrite: bool,
    display: flags.Display,
    **options: Any,
) -> None:
    """Classify texts with the model in the run folder RUN.

    The texts are arguments, rows of a table, or lines of a file or of standard input, where blank
    ones are skipped. A single argument that is the name of a file stands for that. They are
    classified as they are read, in any number. The output has their order: lines, or with --json
    one object per line, with the other columns of the table. The label of a text that has no
    prediction is empty, in JSON null.
    """
    if file is None and len(texts) == 1 and not pairs and os.path.isfile(texts[0]):
        file, texts = Path(texts[0]), ()
    if texts and file is not None:
        raise UsageError("both texts and --data were given", remedy="give one of them")
    if pairs and len(pairs) != len(texts):
        raise UsageError(
            f"{len(pairs)} --text-pair for {len(texts)} texts", remedy="give one for each text"
        )
    names = ("member", "text_column", "text_pair_column", "as_lines", "encoding")
    reading = {name: options.pop(name) for name in names}
    reads_stdin = not texts and file in (None, Path("-"))
    if reads_stdin:  # a live line would mix with what is typed
        display = replace(display, no_progress=True)
    if reads_stdin and sys.stdin is None:
        raise UsageError("standard input is closed", remedy="give texts, or a file with --data")
    written = 0
    with ExitStack() as stack, ExitStack() as progress:
        emit = progress.enter_context(display.progress())
        if reads_stdin and sys.stdin.isatty():
            emit(Info("classifies each line that is typed; Ctrl-D ends"))
        from finetune.evaluation.prediction_file import check_output, json_line, prediction_file

        if output is not None:
            check_output(output, source=file, overwrite=overwrite)
        rows: Iterable[Sequence[Row]]
        if texts:
            rows = [[_as_row(both) for both in zip_longest(texts, pairs)]]
        elif file is None or reads_stdin:
            encoding = reading["encoding"]
            rows = read_lines(sys.stdin.buffer, name="standard input", encoding=encoding)
        else:
            rows = read_texts(run, file, **reading, emit=emit)
        model = load(run, device=options.pop("device"), emit=emit)
        chunks = model.stream(rows, **options, emit=emit)
        first = next(chunks)
        progress.close()  # a live line would stand between the predictions
        write = None
        if output is not None:
            write = stack.enter_context(prediction_file(output, overwrite=overwrite))
        for predictions in chain([first], chunks):
            if write is not None:
                write(predictions)
                written += len(predictions)
            elif display.as_json:
                click.echo(escape_controls("\n".join(map(json_line, predictions))))
            else:
                _show_lines(predictions, is_first=predictions is first)
    if written and not display.quiet:
        click.echo(f"{written:,} rows → {escape_line(str(output))}", err=display.as_json)


def _show_lines(predictions: "Sequence[Prediction]", *, is_first: bool) -> None:
    """Show predictions in columns: aligned on a terminal, elsewhere between tabs."""
    rows = [_cells(prediction) for prediction in predictions]
    titles = [title if is_first else "" for title, _ in rows[0]]
    lines = [[cell for _, cell in row] for row in rows]
    if sys.stdout.isatty():
        show_table(titles, lines)
    else:
        lines = [titles] * is_first + lines
        click.echo("\n".join("\t".join(map(escape_line, line)) for line in lines))


def _cells(prediction: "Prediction") -> list[tuple[str, str]]:
    """Return titles and cells; the probabilities of all classes replace that of the best."""
    from finetune.evaluation.prediction_file import joined

    words: list[tuple[str, str]] = []
    numbers: dict[str, float] = {}
    for name, value in prediction.result.items():
        if isinstance(value, Mapping):
            numbers = dict(value)
        elif isinstance(value, float):
            numbers[name] = value
        else:
            words.append((name, value if isinstance(value, str) else joined(value or ())))
    cells = [(name, f"{number:.3f}") for name, number in numbers.items()]
    texts = prediction.texts.items()
    return words + cells + [(name, text.translate(WITHOUT_LINE_ENDS)) for name, text in texts]
