"""The texts and labels of a labeling session, and the journal that keeps the labels.

Each action is one line of ``texts.labels.jsonl``, flushed before the action is answered. Replaying
the actions gives the labels, so undo means replaying without the last action.
"""

import csv
import fcntl
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune.config.schema import Config, DataConfig
from finetune.data.columns import LABEL_NAMES, columns_named, plain_name, read_labels
from finetune.data.dataset import make_dataset, update_with_texts
from finetune.data.read import as_texts
from finetune.data.stream import read_texts
from finetune.errors import DataError, DataNotFoundError, UsageError
from finetune.events import Info, emit, muted
from finetune.files import write_text_atomically
from finetune.runs.linear_head import prepare_head, read_frozen_features
from finetune.runs.prepare import RunInputs, encode_rows
from finetune.tasks.labels import are_lists
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

How = Literal["file", "spread", "uncertain", "rare", "random", "chosen"]
"""Why a text was shown; ``file`` if its label was in the file, ``chosen`` if a person picked it."""
_FORMAT = "finetune labels 1"


@dataclass(frozen=True)
class Action:
    """One action of a person; ``kind`` determines which of the other fields it uses."""

    kind: Literal["label", "skip", "add", "rename", "undo"]
    row: int | None = None  # from 0
    classes: Sequence[str] = ()
    how: How | None = None
    new_name: str | None = None


@dataclass
class Labels:
    """The labels so far: classes in the order of their addition, and the classes of each row."""

    classes: list[str] = field(default_factory=list)
    rows: dict[int, tuple[str, ...]] = field(default_factory=dict)
    how: dict[int, How] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def apply(self, action: Action) -> None:
        """Change the labels as an action does."""
        if action.kind == "rename":
            new_names = {action.classes[0]: action.new_name}

            def renamed(names: Sequence[str]) -> dict[str, None]:
                return dict.fromkeys(new_names.get(name) or name for name in names)

            self.classes = [*renamed(self.classes)]
            self.rows = {row: (*renamed(names),) for row, names in self.rows.items()}
            return
        self.add_classes(action.classes)
        if action.row is None:
            return
        self.skipped.discard(action.row)
        self.rows.pop(action.row, None)
        if action.kind == "skip":
            self.skipped.add(action.row)
        else:
            self.rows[action.row] = (*action.classes,)
            self.how[action.row] = action.how or self.how.get(action.row, "chosen")

    def add_classes(self, names: Iterable[str]) -> None:
        """Add the classes that are new and not blank."""
        self.classes = [*dict.fromkeys(filter(None, [*self.classes, *names]))]

    def counts(self) -> dict[str, int]:
        """Return the number of labeled rows of each class."""
        counts = Counter(name for names in self.rows.values() for name in names)
        return {name: counts[name] for name in self.classes}


@dataclass
class LabelSource:
    """The rows of a file: a column of texts, or two of sentence pairs, and the labels in the file.

    ``digest`` identifies the texts.
    """

    texts: Sequence[Sequence[str]]
    labels: Labels
    is_multi_label: bool
    digest: str

    @property
    def is_blank(self) -> NDArray[np.bool_]:
        """Whether a text of each row is missing: [rows]."""
        return np.array([not all(map(str.strip, row)) for row in zip(*self.texts, strict=True)])


class LabelJournal:
    """The files next to a table of texts: the journal, and the labeled rows as a table.

    ``texts.csv`` leads to ``texts.labels.jsonl`` and ``texts.labels.csv``.
    """

    def __init__(self, path: Path, source: LabelSource) -> None:
        stem = path.name.partition(".")[0] or path.name
        self.path = path.with_name(f"{stem}.labels.jsonl")
        self.table_path = path.with_name(f"{stem}.labels.csv")
        self.source, self.labels = source, deepcopy(source.labels)
        if path.resolve() == self.table_path.resolve():
            raise UsageError(f"{path} has labels already", remedy="label the file it was made from")
        if self.table_path.exists() and not (
            self.path.exists() and self.table_path.read_bytes().startswith(b"text,")
        ):
            raise _foreign(self.table_path)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UsageError(
                f"{path} is being labeled by another finetune label",
                remedy="use the page that it opened, or stop it first",
            ) from error
        self.actions: list[Action] = []  # without those that were undone
        actions = self._read(
            {"format": _FORMAT, "texts": source.digest, "multi_label": source.is_multi_label}
        )
        for action in actions:
            self._apply(action)
        if actions:
            self.write_table()

    def _read(self, header: dict[str, Any]) -> list[Action]:
        """Return the actions in the journal; write the header if there is none."""
        self._file.seek(0)
        # A line without an end was being written when the server was killed, and never answered.
        complete, _, cut = self._file.read().rpartition(b"\n")
        if not complete and _line_of(header).startswith(cut):
            self._file.truncate(0)
            self._append(header)
            return []
        with suppress(ValueError, TypeError):
            first, *lines = map(json.loads, complete.split(b"\n"))
            if first == header:
                self._file.truncate(len(complete) + 1)
                return [Action(**line) for line in lines]
            if {*first} == {*header}:
                raise DataError(
                    f"{self.path} has labels of other texts, or of another kind",
                    remedy="restore the file and the options, or move the labels elsewhere",
                )
        raise _foreign(self.path)

    def _apply(self, action: Action) -> None:
        if action.kind != "undo":
            self.actions.append(action)
            self.labels.apply(action)
            return
        del self.actions[-1:]
        self.labels = deepcopy(self.source.labels)
        for kept in self.actions:
            self.labels.apply(kept)

    def record(self, action: Action) -> None:
        """Write an action, then change the labels and their table."""
        self._append(
            {name: value for name, value in asdict(action).items() if value not in (None, ())}
        )
        self._apply(action)
        self.write_table()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(_line_of(line))
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_table(self) -> None:
        """Write the labeled rows as a table that ``finetune run`` reads.

        Rows that were drawn at random are its test split, except for the first ones of classes
        that no training row has. All others are training rows. Without test rows, there is no
        column ``split``. The journal is flushed to the disk, so the table need not be.
        """
        rows, how = self.labels.rows, self.labels.how
        trained = {name for row, names in rows.items() if how[row] != "random" for name in names}
        tested = set[int]()
        for row, names in rows.items():
            if how[row] == "random" and trained.issuperset(names):
                tested.add(row)
            trained.update(names)
        table = io.StringIO()
        writer = csv.writer(table)
        columns, is_multi = self.source.texts, self.source.is_multi_label
        names_of_texts = ("text", "text_pair")[: len(columns)]
        writer.writerow([*names_of_texts, "label", "row", "how", *["split"] * bool(tested)])
        writer.writerows(
            [
                *(column[row] for column in columns),
                json.dumps(names, ensure_ascii=False) if is_multi else names[0],
                row + 1,
                how[row],
                *["test" if row in tested else "train"] * bool(tested),
            ]
            for row, names in rows.items()
        )
        write_text_atomically(self.table_path, table.getvalue(), flushes=False)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def _line_of(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _foreign(path: Path) -> DataError:
    return DataError(
        f"{path} was not written by finetune label", remedy="rename it, or label another file"
    )


def read_label_source(path: Path, options: DataConfig, *, is_multi_label: bool) -> LabelSource:
    """Read a table or a file with one text per line."""
    try:  # sentence pairs, if two columns have the names of a pair
        with muted():
            pieces = [*read_texts(path, options, as_lines=False, reads_pairs=True)]
    except DataNotFoundError:
        if options.text_pair_column is not None:
            raise
        pieces = [*read_texts(path, options, as_lines=False)]
    lists = [piece[:] for piece in pieces]
    columns = [[text or "" for piece in lists for text in piece.texts]]
    if lists[0].pairs is not None:
        columns.append([text or "" for piece in lists for text in piece.pairs])
    labels, has_lists = Labels(), False
    if (table := lists[0].source) is not None:
        labels, has_lists = _read_labels(table.frame, options, str(path))
    digest = hashlib.sha256(repr(labels.rows).encode())
    for column in columns:
        update_with_texts(digest, pyarrow.chunked_array([column]))
    source = LabelSource(columns, labels, is_multi_label or has_lists, digest.hexdigest())
    if source.is_blank.all():
        raise DataNotFoundError(f"{path} has no texts", remedy="write one text per line")
    return source


def _read_labels(frame: Any, options: DataConfig, path: str) -> tuple[Labels, bool]:
    """Return the labels of a table, and whether they are lists of classes."""
    names = [str(name) for name in frame.columns]
    chosen = [name for name in names if plain_name(name) in LABEL_NAMES][:1]
    if options.label_column is not None:
        chosen = [*columns_named(options.label_column, names)]
    if unknown := {*chosen} - {*names}:
        raise DataNotFoundError(
            f"{path} has no column {min(unknown)!r}", remedy=f"the columns are: {', '.join(names)}"
        )
    columns = {name: as_texts(frame[name]) for name in chosen}
    if not columns or None in columns.values():
        return Labels(), False
    values = read_labels(pyarrow.table(columns), chosen).to_pylist()
    cells = {row: value for row, value in enumerate(values) if value and value.strip()}
    task = Multi if are_lists({*cells.values()}) else Single
    [column] = task.parse([pyarrow.chunked_array([[*cells.values()]], "string")])
    parsed = [[value] if task is Single else value for value in column.to_pylist()]
    rows = {row: (*names,) for row, names in zip(cells, parsed, strict=True)}
    classes = sorted({name for names in rows.values() for name in names})
    if cells:
        emit(Info(f"{len(cells):,} labels from column {' and '.join(map(repr, chosen))} of {path}"))
    return Labels(classes, rows, dict.fromkeys(rows, "file")), task is Multi


class TextEncoder:
    """Computes features as ``data check`` does, and stores the features of the file."""

    def __init__(self, config: Config) -> None:
        self._config = replace(config, training=replace(config.training, class_weights="none"))
        self._inputs: RunInputs | None = None

    def __call__(self, columns: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """Return the features of texts or text pairs, [texts, hidden]; the first are stored."""
        rows = make_dataset(
            columns[0],
            ["0"] * len(columns[0]),
            task=Regression(),
            pairs=columns[1] if len(columns) > 1 else None,
        )
        if self._inputs is None:
            self._inputs = prepare_head(self._config, rows, Regression(), samples=False)
            return read_frozen_features(self._inputs).features
        known = self._inputs
        examples = encode_rows(rows, "names", known.text_model, config=known.config)
        unstored = replace(known.config, cache=replace(known.config.cache, feature_cache=False))
        inputs = replace(known, config=unstored, examples={"train": examples})
        return read_frozen_features(inputs).features
