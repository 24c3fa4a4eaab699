"""``finetune predict``: classifies texts with the model of a run while it reads them."""

import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from finetune.commands import flags
from finetune.commands.console import show_table, showing
from finetune.commands.evaluate import evaluate
from finetune.commands.python_api import as_python
from finetune.config.schema import UnitInterval
from finetune.data.stream import Texts, not_unicode, read_lines
from finetune.devices import DeviceName, Runtime
from finetune.errors import UsageError
from finetune.events import Emit, Info, WarningMessage, emit, sent_to
from finetune.files import escape_controls, escape_line
from finetune.runs.folder import RunFolder, open_run_folder
from finetune.tasks.explanation import Explanation, decisive

if TYPE_CHECKING:
    from finetune.data.columns import OtherData
    from finetune.data.read import SourceTable
    from finetune.evaluation.prediction_file import PredictionFile
    from finetune.runs.text_predictor import TextPredictor
    from finetune.tasks.base import Prediction, Predictions

# Texts are batched by length within a chunk. The first chunk is small, so that predictions come
# soon. Chunks of long texts have fewer texts, to limit memory.
FIRST_CHUNK_TEXTS = 16
MAX_CHUNK_TEXTS = 1_024
MAX_CHUNK_CHARACTERS = 2**21
# Options for reading a table, which evaluate has too.
READING = ("table", "text_column", "text_pair_column", "encoding")
WITHOUT_LINE_ENDS = str.maketrans("\t\r\n", "   ")
TEXT_SUFFIXES = (".tab", ".txt", ".text", ".log", ".md")
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
    runtime: Runtime = "auto",
    all_scores: bool = False,
    explain: bool = False,
    min_confidence: UnitInterval | None = None,
    target_precision: UnitInterval | None = None,
) -> "Predictions":
    """Classify texts, as ``finetune predict`` does.

    Args:
        run: The run folder, a bundle, or the results of a run.
        texts: A text; a list or Series of texts, or of pairs of texts; or a table with the text
            column of the run, in memory or as the Path of a file. There is one prediction per text,
            in the same order. The label of a missing text is None.
        device: Device to use.
        runtime: torch, or onnx or onnx-int8 on the CPU, after finetune export onnx --verify. auto
            uses onnx if the export is verified, except for a run in bf16 or with a GPU.
        all_scores: Return the probability of each class, not only of the label.
        explain: Return the words that decided, each with the change of the probability of the
            label (or of the value) if the word is left out.
        min_confidence: Abstain if the probability of the label is below this value, such as 0.9.
        target_precision: Abstain below a confidence threshold per class, chosen so that the
            validation rows of the run reach this precision, such as 0.95.
        emit: Receives the events of ``finetune.events``.
    """
    return load(run, device=device, runtime=runtime).classify(
        texts,
        all_scores=all_scores,
        explain=explain,
        min_confidence=min_confidence,
        target_precision=target_precision,
    )


def load(
    run: str | Path, *, device: DeviceName = "auto", runtime: Runtime = "auto"
) -> "LoadedModel":
    """Load the model of a run, to classify texts many times: ``load(run).predict(texts)``.

    Args:
        run: The run folder, a bundle, or the results of a run.
        device: Device to use.
        runtime: torch, or onnx or onnx-int8 on the CPU, after finetune export onnx --verify. auto
            uses onnx if the export is verified, except for a run in bf16 or with a GPU.
        emit: Receives the events of ``finetune.events``.
    """
    folder = open_run_folder(Path(run), accepts_bundle=True)
    from finetune.runs.runtime import load_predictor

    return LoadedModel(folder, load_predictor(folder, device=device, runtime=runtime))


@dataclass(frozen=True)
class LoadedModel:
    """The model of a run, in memory."""

    warnings: ClassVar[Sequence[str]] = ()  # from loading the model
    folder: RunFolder
    model: "TextPredictor" = field(repr=False)

    @cached_property
    def _columns(self) -> "OtherData":
        """The columns of the run. Reading them takes longer than classifying a short text."""
        from finetune.runs.evaluate import other_data

        return other_data(self.folder, "", {})

    def predict(self, texts: Any, *, emit: Emit | None = None, **options: Any) -> "Predictions":
        """Classify texts, as ``finetune.predict`` does, with the same options."""
        predictions: Predictions = as_python(self.classify)(
            texts, emit=emit, progress=False, **options
        )
        return predictions

    def classify(
        self,
        texts: Any,
        *,
        all_scores: bool = False,
        explain: bool = False,
        min_confidence: UnitInterval | None = None,
        target_precision: UnitInterval | None = None,
    ) -> "Predictions":
        """Classify texts of any kind that ``finetune.predict`` accepts."""
        from finetune.data.in_memory import read_any_texts
        from finetune.tasks.base import Predictions

        if isinstance(texts, str) and os.path.isfile(texts):
            remedy = f"pass pathlib.Path({texts!r}) to classify its rows, or [{texts!r}]"
            raise UsageError(f"{texts!r} is the name of a file", remedy=remedy)
        pieces = read_any_texts(texts, self._columns, reads_pairs=self.model.reads_pairs)
        limits = {"min_confidence": min_confidence, "target_precision": target_precision}
        chunks = self.stream(pieces, limits, all_scores=all_scores, explains=explain)
        return Predictions(chain.from_iterable(chunks))

    def stream(
        self,
        pieces: Iterable[Texts],
        limits: Mapping[str, float | None] | None = None,
        *,
        all_scores: bool = False,
        explains: bool = False,
        with_rows: bool = True,
    ) -> "Iterator[Sequence[Prediction]]":
        """Yield predictions in chunks, while ``pieces`` yields the texts that are available.

        A missing text gets a prediction without values. ``with_rows`` adds the rows of a table.
        """
        from finetune.runs.manifest import find_lowest_probabilities
        from finetune.tasks.base import abstain

        lowest = find_lowest_probabilities(self.folder, **limits) if limits else None
        count = missing = abstained = 0
        for chunk, values in _chunks(pieces, self._values_of_classes):
            texts, pairs, is_filled = chunk.texts, chunk.pairs, chunk.is_filled
            if (pairs is not None) != self.model.reads_pairs:
                kind = "sentence pairs" if self.model.reads_pairs else "single texts"
                raise UsageError(
                    f"the model reads {kind}, but got {reprlib.repr(texts[0])}",
                    remedy="for sentence pairs, add one --text-pair per text; otherwise drop it",
                )
            predictions: Sequence[Prediction] = []
            if any(is_filled):
                filled = [column and [*compress(column, is_filled)] for column in (texts, pairs)]
                predictions = self.model.predict(*filled, all_scores=all_scores, explains=explains)
            if lowest is not None:
                predictions = abstain(predictions, lowest)
                abstained += sum(None in item.values.values() for item in predictions)
            if values:
                predictions = [_with_labels(prediction, values) for prediction in predictions]
            empty, following = self.model.no_prediction(all_scores=all_scores), iter(predictions)
            if explains:
                empty = replace(empty, explanation=Explanation())
            rows = chunk.records() if with_rows else [{}] * len(texts)
            cells = zip(is_filled, texts, pairs or [None] * len(texts), rows, strict=True)
            count, missing = count + len(texts), missing + is_filled.count(False)
            yield [
                replace(
                    next(following) if has_text else empty,
                    text=text or "",
                    text_pair=pair,
                    columns=row,
                )
                for has_text, text, pair, row in cells
            ]
        if missing:
            labels = "is missing: its label is" if missing == 1 else "are missing: their labels are"
            emit(WarningMessage(f"{missing:,} of {count:,} texts {labels} empty"))
        if lowest is not None:
            emit(Info(f"the model abstained on {abstained:,} of {count:,} texts"))

    def _values_of_classes(self, source: "SourceTable | None") -> Mapping[str, Any]:
        """Return the values of classes in the label column of a table; empty for texts."""
        label = self._columns.earlier_columns.get("label_column") if source else None
        if source is None or label not in source.frame or label in source.class_names:
            return {}
        from finetune.data.values import list_of
        from finetune.tasks.labels import values_of_classes

        names = self.model.task.class_names
        return values_of_classes(names, list_of(source.frame[label]))


def _with_labels(prediction: "Prediction", values: Mapping[str, Any]) -> "Prediction":
    """Return a prediction with the values of its classes instead of their names."""
    labels = {
        name: [values.get(item, item) for item in value]
        if isinstance(value, list)
        else values.get(value, value)
        for name, value in prediction.values.items()
    }
    return replace(prediction, values=labels)


def _chunks(
    pieces: Iterable[Texts], values_of: "Callable[[SourceTable | None], Mapping[str, Any]]"
) -> Iterator[tuple[Texts, Mapping[str, Any]]]:
    """Yield texts to predict at once, with what a function returns for their whole table."""
    max_texts = FIRST_CHUNK_TEXTS
    for available in pieces:
        start, values = 0, values_of(available.source)
        while start < len(available):
            chunk = available[start : start + max_texts]
            ends = accumulate(len(text or "") for text in chunk.texts)
            count = max(1, sum(end <= MAX_CHUNK_CHARACTERS for end in ends))
            yield chunk[:count], values
            start += count
            max_texts = min(2 * max_texts, MAX_CHUNK_TEXTS)


def _read_file(
    run: Path, file: Path, options: Mapping[str, Any], *, lines: bool
) -> Iterator[Texts]:
    """Return the rows of a table, or the lines of a file, as they are read."""
    folder = open_run_folder(run, accepts_bundle=True)
    from finetune.data.stream import read_texts
    from finetune.runs.evaluate import other_data
    from finetune.runs.manifest import reads_pairs

    data = other_data(folder, str(file), flags.without_none(options))
    return read_texts(file, data, as_lines=lines, reads_pairs=reads_pairs(folder))


def _is_file_name(text: str) -> bool:
    """Return whether an argument is a file, or has the suffix of a table or text file."""
    if text == "-" or os.path.isfile(text):
        return True
    if re.search(r"\s|://", text):
        return False
    from finetune.data.read import TABLE_SUFFIXES  # whose import takes a second

    return text.lower().endswith((*TABLE_SUFFIXES, *TEXT_SUFFIXES)) or "/" in text


def _as_texts(texts: Sequence[str], pairs: Sequence[str]) -> Texts:
    try:
        "".join([*texts, *pairs]).encode()
    except UnicodeEncodeError as error:
        raise not_unicode(error.object, error) from error
    return Texts([*texts], [*pairs] or None)


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--data",
    "file",
    type=flags.PATH,
    help="Table, or file with one text per line; - is standard input.",
)
@click.option("--text-pair", "pairs", multiple=True, help="Second text of each TEXT.")
@flags.options_of(evaluate, only=READING)
@click.option("--lines", is_flag=True, help="Read each line of a table as a text.")
@flags.output_file_option(
    "Write the table with predictions to this file; a suffix such as .csv, .txt or .xlsx sets its "
    "format."
)
@flags.options_of(predict)
@flags.with_display
def command(
    *,
    run: Path,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    file: Path | None,
    lines: bool,
    output: Path | None,
    overwrite: bool,
    display: flags.Display,
    **options: Any,
) -> None:
    """Classify texts with the model in the run folder, or bundle, RUN.

    The texts are arguments, the rows of a table, or the lines of a file or of standard input (-). A
    single argument with the suffix of a table or text file is read as a file name.

    The output has one line per text, in the same order. With --json, each line has all columns of
    the table. The label is empty (null in JSON) if the text is missing or the model abstains.
    --output writes the table with the predictions added.
    """
    texts, file = _find_file(texts, pairs, file)
    reading = {name: options.pop(name) for name in READING}
    reads_stdin = not texts and file in (None, Path("-"))
    if reads_stdin and sys.stdin is None:
        raise UsageError("standard input is closed", remedy="pass texts, or a file with --data")
    # A progress bar would mix with the typing.
    view = showing(quiet=display.quiet, no_progress=display.no_progress or reads_stdin)
    with ExitStack() as live, sent_to(live.enter_context(view)):
        if reads_stdin and sys.stdin.isatty():
            emit(Info("type one text per line; Ctrl-D ends"))
        from finetune.evaluation.prediction_file import PredictionFile

        written = None
        if output is not None:
            written = PredictionFile(output, source=file, overwrite=overwrite)
        pieces: Iterable[Texts] = [_as_texts(texts, pairs)]
        if reads_stdin:
            encoding = reading["encoding"]
            pieces = read_lines(sys.stdin.buffer, name="standard input", encoding=encoding)
        elif file is not None:
            pieces = _read_file(run, file, reading, lines=lines)
        model = load(run, device=options.pop("device"), runtime=options.pop("runtime"))
        if written:
            pieces = written.reading(pieces)
        wanted = {"all_scores": options.pop("all_scores"), "explains": options.pop("explain")}
        chunks = model.stream(pieces, options, **wanted, with_rows=not written)
        first = next(chunks)
        live.close()  # a progress bar would break up the predictions
        _show(chain([first], chunks), written, display=display)


def _find_file(
    texts: tuple[str, ...], pairs: tuple[str, ...], file: Path | None
) -> tuple[tuple[str, ...], Path | None]:
    """Return the texts, or the file that they name; raise ``UsageError`` for other arguments."""
    if file is None and not pairs and texts and all(map(_is_file_name, texts)):
        if len(texts) > 1:
            remedy = "pass one file; to classify words that look like files, use standard input"
            raise UsageError(f"{', '.join(texts[:3])} are several files", remedy=remedy)
        return (), Path(texts[0])
    if texts and file is not None:
        raise UsageError("texts and --data can't be combined", remedy="drop one of them")
    if pairs and len(pairs) != len(texts):
        message = f"there are {len(pairs)} --text-pair for {len(texts)} texts"
        raise UsageError(message, remedy="add one --text-pair per text")
    return texts, file


def _show(
    chunks: "Iterable[Sequence[Prediction]]",
    written: "PredictionFile | None",
    *,
    display: flags.Display,
) -> None:
    from finetune.data.write import as_json

    for number, predictions in enumerate(chunks):
        if written:
            written.add(predictions)
        elif display.as_json:
            lines = (as_json(prediction.to_json()) for prediction in predictions)
            click.echo(escape_controls("\n".join(lines)))
        else:
            _show_lines(predictions, is_first=number == 0)
    if written:
        written.write()
        if not display.quiet:
            rows = f"{written.rows:,} rows → {escape_line(str(written.path))}"
            click.echo(rows, err=display.as_json)


def _show_lines(predictions: "Sequence[Prediction]", *, is_first: bool) -> None:
    """Show predictions in columns: aligned on a terminal, elsewhere separated by tabs."""
    rows = [_cells(prediction) for prediction in predictions]
    titles, lines = [title for title, _ in rows[0]], [[cell for _, cell in row] for row in rows]
    if sys.stdout.isatty():
        marked = [decisive(prediction.explanation or []) for prediction in predictions]
        show_table(titles if is_first else [""] * len(titles), lines, marked=marked)
    else:
        lines = [titles] * is_first + lines
        click.echo("\n".join("\t".join(map(escape_line, line)) for line in lines))


def _cells(prediction: "Prediction") -> list[tuple[str, str]]:
    """Return titles and cells. The probabilities of all classes replace the highest one."""
    from finetune.data.write import rounded
    from finetune.evaluation.prediction_file import joined

    words, numbers = [], dict[str, float | None]()
    for name, value in prediction.result.items():
        if isinstance(value, Mapping):
            numbers = dict(value)
        elif name == "probability":
            numbers[name] = value
        elif name == "explanation":
            words.append((name, joined(value)))
        else:
            shown = rounded(value) if isinstance(value, float) else value
            cell = joined(shown) if isinstance(shown, list) else str(shown)
            words.append((name, "" if shown is None else cell))
    words += [(name, "" if value is None else f"{value:.3f}") for name, value in numbers.items()]
    texts = prediction.texts.items()
    return words + [(name, text.translate(WITHOUT_LINE_ENDS)) for name, text in texts]
