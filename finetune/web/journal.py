"""The texts and labels of a labeling session, and the journal that keeps the labels.

Each action is one line of ``texts.labels.jsonl``, flushed before the action is answered. Replaying
the actions gives the labels, so undo means replaying without the last action. Lines contain the
texts of their row, so that rows can be added to the file, and a hash of the label table. If the
hash differs, the user edited the table, and the edits become actions.
"""

import csv
import fcntl
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune.config.schema import Config, DataConfig
from finetune.data.columns import LABEL_NAMES, columns_named, plain_name, read_labels
from finetune.data.dataset import make_dataset
from finetune.data.labeling_tools import How
from finetune.data.read import TABLE_SUFFIXES, read_file
from finetune.data.stream import read_texts
from finetune.data.values import as_texts
from finetune.errors import DataError, DataNotFoundError, FinetuneError, UsageError
from finetune.events import Info, WarningMessage, emit, muted
from finetune.files import append_jsonl, read_bytes, read_jsonl, write_text_atomically
from finetune.runs.linear_head import prepare_head, read_frozen_features, read_text_features
from finetune.runs.prepare import RunInputs
from finetune.tasks.labels import are_lists
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

_FORMAT = "finetune labels 2"


@dataclass(frozen=True)
class Action:
    """A user action. ``kind`` determines which of the other fields it uses.

    A class renamed to "" is deleted. ``agrees`` is whether a new label is the
    model's suggestion.
    """

    kind: Literal["label", "skip", "add", "rename", "undo"]
    row: int | None = None  # from 0
    classes: Sequence[str] = ()
    how: How | None = None
    new_name: str | None = None
    agrees: bool | None = None


@dataclass
class Labels:
    """The labels so far: classes in order of addition, and the classes of each row."""

    classes: list[str] = field(default_factory=list)
    rows: dict[int, tuple[str, ...]] = field(default_factory=dict)
    how: dict[int, How] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    confirmed: set[int] = field(default_factory=set)  # rows whose label was confirmed
    agreements: list[bool] = field(default_factory=list)

    def apply(self, action: Action) -> None:
        """Apply an action to the labels."""
        if action.kind == "rename":
            new_names = {action.classes[0]: action.new_name}

            def renamed(names: Sequence[str]) -> tuple[str, ...]:
                return tuple(dict.fromkeys(filter(None, (new_names.get(n, n) for n in names))))

            self.classes = [*renamed(self.classes)]
            rows = {row: (names, renamed(names)) for row, names in self.rows.items()}
            self.rows = {row: new for row, (old, new) in rows.items() if new or not old}
            return
        self.add_classes(action.classes)
        if action.row is None:
            return
        self.skipped.discard(action.row)
        before = self.rows.pop(action.row, None)
        if action.kind == "skip":
            self.skipped.add(action.row)
            return
        names = self.rows[action.row] = (*action.classes,)
        self.how[action.row] = action.how or self.how.get(action.row, "chosen")
        (self.confirmed.add if before == names else self.confirmed.discard)(action.row)
        if action.agrees is not None:
            self.agreements.append(action.agrees)

    def add_classes(self, names: Iterable[str]) -> None:
        """Add new classes that aren't blank."""
        self.classes = [*dict.fromkeys(filter(None, [*self.classes, *names]))]

    def counts(self) -> dict[str, int]:
        """Return the number of labeled rows per class."""
        counts = Counter(name for names in self.rows.values() for name in names)
        return {name: counts[name] for name in self.classes}


@dataclass
class LabelSource:
    """The rows of a file: one text column, or two for sentence pairs, and the labels in the file.

    Labeled texts that are no longer in the file are added at the end.
    """

    texts: Sequence[list[str]]
    labels: Labels
    is_multi_label: bool

    def __post_init__(self) -> None:
        self.count = len(self.texts[0])
        self._rows: dict[str, list[int]] = {}
        for row, texts in enumerate(zip(*self.texts, strict=True)):
            self._rows.setdefault(_key(texts), []).append(row)

    @property
    def is_blank(self) -> NDArray[np.bool_]:
        """Whether each row lacks a text: [rows]."""
        return np.array([not all(map(str.strip, row)) for row in zip(*self.texts, strict=True)])

    def find_row(self, row: int | None, texts: Sequence[str]) -> int:
        """Return the row with these texts, preferably ``row``. Add it if it doesn't exist."""
        rows = self._rows.setdefault(_key(texts), [])
        if not rows:
            rows.append(len(self.texts[0]))
            for column, text in zip(self.texts, texts, strict=True):
                column.append(text)
        return row if row in rows else rows[0]

    def draw(self, seed: int) -> NDArray[np.int64]:
        """Return all rows in a random order that doesn't change if rows are added."""
        salt = seed.to_bytes(8, "big")
        return np.argsort(
            [_hash(_key(row).encode(), salt=salt) for row in zip(*self.texts, strict=True)]
        )


def _key(texts: Sequence[str]) -> str:
    """Return the words of texts, because spreadsheets change the spaces between them."""
    return "\0".join(" ".join(text.split()) for text in texts)


def _hash(content: bytes, *, salt: bytes = b"") -> str:
    return hashlib.blake2b(content, digest_size=8, salt=salt).hexdigest()


def _with_digest(line: Mapping[str, Any]) -> dict[str, Any]:
    return {**line, "digest": _hash(json.dumps(line).encode())}


class LabelJournal:
    """The files next to a text table: the journal, and the labeled rows as a table.

    ``texts.csv`` leads to ``texts.labels.jsonl`` and ``texts.labels.csv``.
    """

    random_fraction = 0.25
    suggestions: Mapping[int, tuple[tuple[str, ...], float]] = {}
    words: Mapping[int, set[str]] = {}  # lowercase words that support a suggestion

    def __init__(self, path: Path, source: LabelSource) -> None:
        stem = path
        while stem.suffix.lower() in (*TABLE_SUFFIXES, ".txt"):
            stem = stem.with_suffix("")
        self.path = path.with_name(f"{stem.name}.labels.jsonl")
        self.table_path = path.with_name(f"{stem.name}.labels.csv")
        self.source, self.labels = source, deepcopy(source.labels)
        self.actions: list[Action] = []  # without undone actions
        if stem.suffix == ".labels":
            raise UsageError(f"{path} has labels already", remedy="label the file it was made from")
        if self.table_path.exists() and not self.path.exists():
            raise _foreign(self.table_path)
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UsageError(
                f"{path} is being labeled by another finetune label",
                remedy="use the page that it opened, or stop it first",
            ) from error
        for action in self._read():
            self._apply(action)
        if others := len(source.texts[0]) - source.count:
            emit(Info(f"{others:,} labeled texts are not in {path}: their labels are kept"))
        self.order = source.draw(self.seed)
        self.take_edits()
        if self.actions:
            write_text_atomically(self.table_path, self._table(), flushes=False)

    def _read(self) -> list[Action]:
        """Read the actions in the journal. Write the first line of a new journal."""
        source, content = self.source, read_bytes(self.path)
        header = {"format": _FORMAT, "multi_label": source.is_multi_label}
        seed = int(_hash("\n".join(source.texts[0]).encode()), 16)
        new = _with_digest({**header, "seed": seed})
        if json.dumps(new).encode().startswith(content) and not self.table_path.exists():
            append_jsonl(self.path, [new])
        try:
            for first in (lines := read_jsonl(self.path)):
                if first.pop("digest", None) not in (None, _with_digest(first)["digest"]):
                    raise ValueError(first)
            first, *lines = lines
            self.seed = int(first.pop("seed"))
            self._tables = {line.pop("table", "") for line in lines}
            for line in lines:
                if "row" in line:
                    line["row"] = source.find_row(line["row"], line.pop("texts"))
            actions = [Action(**line) for line in lines]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(
                f"{self.path} is damaged, or not from finetune label",
                remedy=f"restore it, or rename it and {self.table_path}",
            ) from None
        rows = [action.row for action in actions if action.row is not None]
        if first != header or (rows and min(rows) >= source.count):
            raise DataError(
                f"{self.path} has labels of other texts, or of another kind",
                remedy="restore the file and the options, or move the labels elsewhere",
            )
        # An incomplete line was being written when the server was killed, so it was not
        # acknowledged.
        if incomplete := read_bytes(self.path).rpartition(b"\n")[2]:
            emit(WarningMessage(f"{self.path}: an incomplete last line is dropped"))
            os.truncate(self.path, self.path.stat().st_size - len(incomplete))
        return actions

    def _apply(self, action: Action) -> None:
        if action.kind == "undo":
            self._replay(self.actions[:-1])
        else:
            self.actions.append(action)
            self.labels.apply(action)

    def _replay(self, actions: list[Action]) -> None:
        self.actions, self.labels = actions, deepcopy(self.source.labels)
        for action in actions:
            self.labels.apply(action)

    def record(self, *actions: Action) -> None:
        """Write actions and the resulting labels. If that fails, nothing changes."""
        before = [*self.actions]
        for action in actions:
            self._apply(action)
        try:
            self._write(actions)
        except (OSError, FinetuneError):
            self._replay(before)
            raise

    def _write(self, actions: Sequence[Action]) -> None:
        table, end = self._table(), self.path.stat().st_size
        lines = [*map(self._line_of, actions)]
        lines[-1]["table"] = _hash(table.encode())
        try:
            append_jsonl(self.path, map(_with_digest, lines))
            os.fsync(self._file.fileno())
            write_text_atomically(self.table_path, table, flushes=False)
        except OSError:
            os.truncate(self.path, end)
            raise
        self._tables.add(lines[-1]["table"])

    @property
    def _columns(self) -> list[str]:
        return [*("text", "text_pair")[: len(self.source.texts)], "label", "row", "how"]

    def label_of(self, row: int) -> tuple[str, ...] | None:
        """Return the classes of a row, or None if unlabeled."""
        return self.labels.rows.get(row)

    def _line_of(self, action: Action) -> dict[str, Any]:
        line = {name: value for name, value in asdict(action).items() if value not in (None, ())}
        if action.row is not None:
            line["texts"] = [column[action.row] for column in self.source.texts]
        return line

    def take_edits(self) -> None:
        """Record the user's edits of the table as actions."""
        content = read_bytes(self.table_path) if self.table_path.exists() else b""
        if not content or _hash(content) in self._tables:
            return
        rows = read_rows(self.table_path)
        if {*rows[0]} - {"split"} != {*self._columns}:
            raise _foreign(self.table_path)
        before, after, names = self.labels.rows, dict[int, str](), self._columns[:-3]
        for row in rows:
            number = int(row["row"]) - 1 if row["row"].isdecimal() else None
            after[self.source.find_row(number, [row[name] for name in names])] = row["label"]
        parsed = _parse([*after.values()], is_multi=self.source.is_multi_label)
        edits = [Action("skip", row) for row in before if row not in after]
        for place, classes in zip(after, parsed, strict=True):
            if classes != before.get(place):
                kind: Any = "skip" if classes is None else "label"
                edits.append(Action(kind, place, classes or ()))
        if edits:
            emit(Info(f"{len(edits):,} labels were edited in {self.table_path}"))
            self.record(*edits)

    def _table(self) -> str:
        """Return the labeled rows as a table for ``finetune run``.

        Randomly drawn rows are its test split, except for the first rows of classes
        without training rows. All other rows are training rows. Without test rows, the table has no
        ``split`` column. The journal is flushed to disk, so the table need not be.
        """
        rows, how, source = self.labels.rows, self.labels.how, self.source
        trained = {name for row, names in rows.items() if how[row] != "random" for name in names}
        tested = set[int]()
        for row, names in rows.items():
            if how[row] == "random" and trained.issuperset(names):
                tested.add(row)
            trained.update(names)
        table = io.StringIO()
        writer = csv.writer(table)
        writer.writerow([*self._columns, *["split"] * bool(tested)])
        writer.writerows(
            [
                *(column[row] for column in source.texts),
                json.dumps(names, ensure_ascii=False) if source.is_multi_label else names[0],
                row + 1 if row < source.count else "",
                how[row],
                *["test" if row in tested else "train"] * bool(tested),
            ]
            for row, names in rows.items()
        )
        return table.getvalue()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table that a spreadsheet program may have saved."""
    with muted():
        rows: list[dict[str, str]] = read_file(path, DataConfig()).columns.to_pylist()
    return rows


def _foreign(path: Path) -> DataError:
    return DataError(
        f"{path} is not as finetune label writes it",
        remedy="rename it, or remove columns that you added",
    )


def read_label_source(path: Path, options: DataConfig, *, is_multi_label: bool) -> LabelSource:
    """Read a table or a file with one text per line."""
    try:  # sentence pairs, if two columns are named like a pair
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
    source = LabelSource(columns, labels, is_multi_label or has_lists)
    for row in np.flatnonzero(is_blank := source.is_blank).tolist():
        labels.rows.pop(row, None)
    if is_blank.all():
        raise DataNotFoundError(f"{path} has no texts", remedy="write one text per line")
    return source


def _read_labels(frame: Any, options: DataConfig, path: str) -> tuple[Labels, bool]:
    """Return the labels in a table, and whether they are lists of classes."""
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
    has_lists = are_lists({*cells.values()})
    parsed = _parse([*cells.values()], is_multi=has_lists)
    rows = {row: names for row, names in zip(cells, parsed, strict=True) if names is not None}
    classes = sorted({name for names in rows.values() for name in names})
    if cells:
        emit(Info(f"{len(cells):,} labels from column {' and '.join(map(repr, chosen))} of {path}"))
    return Labels(classes, rows, dict.fromkeys(rows, "file")), has_lists


def _parse(cells: Sequence[str], *, is_multi: bool) -> list[tuple[str, ...] | None]:
    """Return the classes in each cell, or None for empty cells."""
    task = Multi if is_multi else Single
    [column] = task.parse([pyarrow.chunked_array([cells], "string")])
    values = column.to_pylist()
    return [None if v is None else (*v,) if is_multi else (v,) for v in values]


class TextEncoder:
    """Computes features like ``data check``, and stores the features of the file."""

    def __init__(self, config: Config) -> None:
        self._config = replace(config, training=replace(config.training, class_weights="none"))
        self._inputs: RunInputs | None = None

    def __call__(self, columns: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """Return the features of texts or pairs, [texts, hidden]. Store those of the first call."""
        if self._inputs is not None:
            return read_text_features(self._inputs, columns)
        rows = make_dataset(
            columns[0],
            ["0"] * len(columns[0]),
            task=Regression(),
            pairs=columns[1] if len(columns) > 1 else None,
        )
        self._inputs = prepare_head(self._config, rows, Regression(), samples=False)
        return read_frozen_features(self._inputs).features
