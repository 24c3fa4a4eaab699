"""Audit suspects in a labeling session, where labels are decisions on them."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np

from finetune.data.corrections import DROP, KEEP, read_class_columns
from finetune.errors import DataError
from finetune.files import write_text_atomically
from finetune.report.page import to_csv
from finetune.web.journal import Action, LabelJournal, Labels, LabelSource, read_rows

MAP_COLUMNS = ("label", "new name")
WORD = re.compile(r"(\S+) -\S+?(?:\||$)")


class Suspects(LabelJournal):
    """``suspects.csv`` as a journal. Its ``decision`` column holds a class, ``keep`` or ``drop``.

    ``misspelled`` maps class names to their probable correct names. They are shown first, and
    decisions on them are saved in ``label_map.csv``, where dropped labels are empty.
    """

    random_fraction = 0.0

    def __init__(
        self,
        path: Path,
        classes: Sequence[str],
        *,
        is_multi_label: bool,
        misspelled: Mapping[str, str] | None = None,
    ) -> None:
        self.table_path, self.map_path = path, path.with_name("label_map.csv")
        rows, decided = read_rows(path), self._read_map()
        for name, other in (misspelled or {}).items():
            new = decided.get(name)
            decision = "" if new is None else KEEP if new == name else new or DROP
            row = {"text": f"all rows with the label {name}", "label": name, "suggested": other}
            rows.append({**row, "decision": decision})
        labels = Labels([*classes, DROP])
        self.source = LabelSource([[row["text"] for row in rows]], labels, is_multi_label)
        self._given = [self._names_in(row["label"]) for row in rows]
        self.suggestions = {
            number: (self._names_in(row["suggested"]), float(row.get("suggested_probability") or 0))
            for number, row in enumerate(rows)
        }
        self.words = {
            number: {word.casefold() for word in WORD.findall(row.get("words") or "")}
            for number, row in enumerate(rows)
        }
        for number, row in enumerate(rows):
            if decision := row["decision"].strip():
                is_kept = decision.casefold() == KEEP
                names = self._given[number] if is_kept else self._names_in(decision)
                labels.rows[number] = names
        self.order = np.roll(np.arange(len(rows)), len(misspelled or {}))  # misspelled names first
        self.actions, self.labels = [], deepcopy(labels)
        self._written = {**labels.rows}

    def _names_in(self, cell: str) -> tuple[str, ...]:
        if not self.source.is_multi_label:
            return (cell,)
        return (*(json.loads(cell) if cell[:1] == "[" else filter(None, cell.split("|"))),)

    def _read_map(self) -> dict[str, str]:
        if not self.map_path.exists():
            return {}
        columns = read_class_columns(self.map_path)
        return {name: new for name, new, *_ in zip(*columns, strict=True) if name != MAP_COLUMNS[0]}

    def label_of(self, row: int) -> tuple[str, ...] | None:
        """Return the decision on a row, or its label."""
        return self.labels.rows.get(row, self._given[row])

    def _write(self, actions: Sequence[Action]) -> None:
        """Write only changed decisions, because the others may have been edited."""
        rows, names = read_rows(self.table_path), self._read_map()
        if [row["text"] for row in rows] != self.source.texts[0][: len(rows)]:
            remedy = "start finetune label --suspects again"
            raise DataError(f"{self.table_path} has other rows now", remedy=remedy)
        decided, written = self.labels.rows, self._written
        changed = [n for n in range(len(self._given)) if decided.get(n) != written.get(n)]
        for number in changed:
            given, chosen = self._given[number], decided.get(number)
            if number < len(rows):
                rows[number]["decision"] = "" if chosen is None else self._decide(given, chosen)
                continue
            if chosen is not None and len(chosen) > 1:
                raise DataError(f"{given[0]} can become one class only", remedy="choose one")
            names.pop(given[0], None)
            if chosen is not None:
                names[given[0]] = "" if chosen in ((), (DROP,)) else chosen[0]
        if changed and changed[0] < len(rows):
            table = to_csv([*rows[0]], (row.values() for row in rows))
            write_text_atomically(self.table_path, table)
        if changed and changed[-1] >= len(rows):
            write_text_atomically(self.map_path, to_csv(MAP_COLUMNS, names.items()))
        self._written = {**decided}

    def _decide(self, given: Sequence[str], chosen: Sequence[str]) -> str:
        if chosen == given:
            return KEEP
        is_list = self.source.is_multi_label and DROP not in chosen
        return json.dumps(chosen, ensure_ascii=False) if is_list else min(chosen, key=DROP.__ne__)

    def take_edits(self) -> None:
        """Do nothing, because edits are kept: only changed decisions are written."""

    def close(self) -> None:
        """Do nothing, because there is no lock."""
