"""The labels of a labeling session, and the journal that keeps them.

Each action is one line of ``texts.labels.jsonl``, flushed before the action is answered. Replaying
the actions gives the labels, so undo means replaying without the last action.
"""

import csv
import fcntl
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError, UsageError
from finetune.files import write_text_atomically

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
