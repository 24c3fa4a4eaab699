"""``finetune predict`` as a function."""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.lines import Row
from finetune.devices.names import DeviceName
from finetune.errors import DataError, UsageError
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import RunFolder, load_saved_config, load_saved_task, open_run_folder

if TYPE_CHECKING:
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

    task = load_saved_task(folder)
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
    from finetune.distributed.joining import join_processes
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

    saved, manifest = load_saved_config(folder).data, Manifest.read(folder.manifest_file)
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
