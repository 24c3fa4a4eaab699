"""A labeling session: the labels of one person, and a head that learns from them in the background.

The head is fitted on the texts that were not drawn at random, as ``finetune run`` will be. The
random texts measure how often the head agrees with the person.
"""

import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from torch.nn import functional

from finetune.events import Advance, Event, sent_to
from finetune.tasks.labels import name_as_text, name_classes
from finetune.tasks.tables import wilson_interval
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    MIN_FITTING_NAMES,
    LabelledFeatures,
    fit_linear_head,
    names_fit,
    normalize,
)
from finetune.web.journal import Action, How, LabelJournal
from finetune.web.selection import Scores, Selection, find_contradictions

Features = NDArray[np.float32]
LabeledRows = Mapping[int, Sequence[str]]
ReadFeatures = Callable[[Sequence[Sequence[str]]], Features]
"""Returns the features of one column of texts, or of two columns of pairs: [texts, hidden]."""

# Points of the curve of agreement, and the least number of random texts that it needs.
CURVE_POINTS, MIN_RANDOM_TEXTS = 8, 10
# After how many labels the curve is measured again.
CURVE_EVERY = 10
MAX_LISTED, MAX_NAME_CHARACTERS = 200, 200
# A rough fit is enough to rank texts.
MAX_GRADIENT = 1e-3


class LabelingSession:
    """The logic behind the page and the endpoints. Rows are counted from 0.

    ``texts`` is a column of texts, or two columns of sentence pairs.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[str]],
        journal: LabelJournal,
        read_features: ReadFeatures,
        *,
        is_blank: NDArray[np.bool_] | None = None,
    ) -> None:
        self.texts, self.journal, self._read_features = texts, journal, read_features
        self.count = len(texts[0])
        is_done = np.zeros(self.count, bool) if is_blank is None else is_blank.copy()
        self._filled = self.count - int(is_done.sum())
        is_done[[row for row, how in journal.labels.how.items() if how == "file"]] = True
        self._selection = Selection(self.count, has_label=is_done)
        self._random_rows = {*self._selection.random_rows.tolist()}
        self._lock = threading.RLock()
        self._changed, self._is_stopped = threading.Event(), False
        self._features: Features | None = None
        self._name_features: dict[str, NDArray[np.float32]] = {}
        self._scores: Scores | None = None
        self._shown: tuple[int, How] | None = None
        self._agreement: dict[str, float] | None = None
        self._curve: list[dict[str, float]] = []
        self._progress, self._error = 0.0, ""
        self._switch_seconds = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._work, name="labeling", daemon=True)

    def start(self) -> None:
        """Compute features and fit heads in the background from now on."""
        # The endpoints wait less for the interpreter while a head is fitted.
        sys.setswitchinterval(0.0005)
        self._thread.start()

    def stop(self) -> None:
        """End the background work, and release the files."""
        self._is_stopped = True
        self._changed.set()
        sys.setswitchinterval(self._switch_seconds)
        self.journal.close()

    def next(self) -> tuple[int, How] | None:
        """Return the row to label now: the same one until it is labeled or skipped."""
        with self._lock:
            labels = self.journal.labels
            if self._shown is None or self._shown[0] in labels.rows.keys() | labels.skipped:
                self._shown = self._selection.next(labels, self._scores)
            return self._shown

    def label(self, row: int, classes: Sequence[str] | None) -> None:
        """Give a row its classes, or skip it with None."""
        if not 0 <= row < self.count:
            message = f"there is no row {row + 1}: the rows are 1 to {self.count}"
            raise HTTPException(404, message)
        with self._lock:
            how: How = self.journal.labels.how.get(row, "chosen")
            if row in self._random_rows:
                how = "random"
            elif self._shown is not None and self._shown[0] == row:
                how = self._shown[1]
            if classes is None:
                self._record(Action("skip", row, how=how))
                return
            names = tuple(dict.fromkeys(map(self.check_name, classes)))
            if not self.journal.is_multi_label and len(names) != 1:
                raise HTTPException(422, "this data has one class per text: send one label")
            self._record(Action("label", row, names, how))

    def undo(self) -> int | None:
        """Take back the last action; return its row, which is shown again."""
        with self._lock:
            actions = self.journal.effective
            if not actions:
                raise HTTPException(409, "there is nothing to undo")
            last = actions[-1]
            self._record(Action("undo"))
            if last.row is not None and last.row not in self.journal.labels.rows:
                self._shown = last.row, last.how or "chosen"
            return last.row

    def change_class(self, name: str, new_name: str | None) -> None:
        """Add a class or rename it; renaming it to an existing class merges the two."""
        with self._lock:
            if new_name is None:
                self._record(Action("add", classes=(self.check_name(name),)))
                return
            if name not in self.journal.labels.classes:
                raise HTTPException(404, f"there is no class {name!r}")
            self._record(Action("rename", classes=(name,), new_name=self.check_name(new_name)))

    @staticmethod
    def check_name(name: str) -> str:
        """Return a class name as ``finetune run`` reads it."""
        name = name_classes([name])[name]
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise HTTPException(422, f"a class name has 1 to {MAX_NAME_CHARACTERS} characters")
        return name

    def _record(self, action: Action) -> None:
        self.journal.record(action)
        self._changed.set()

    def suggestion(self, row: int) -> dict[str, Any] | None:
        """Return what the head predicts for a row."""
        if (scores := self._scores) is None:
            return None
        names, probability = scores.predict(row)
        return {"label": self._label_of(names), "probability": round(probability, 4)}

    def _label_of(self, names: Sequence[str]) -> str | list[str]:
        """Return classes as the endpoints return them: a name, or a list of names."""
        return [*names] if self.journal.is_multi_label else names[0]

    def text_of(self, row: int) -> dict[str, Any]:
        """Return the number of a row, counted from 1, and its texts."""
        texts = zip(("text", "text_pair"), self.texts, strict=False)
        return {"row": row + 1, **{name: column[row] for name, column in texts}}

    def status(self) -> dict[str, Any]:
        """Return counts, the progress of the features, and how often the head agrees."""
        with self._lock:
            labels = self.journal.labels
            return {
                "texts": self._filled,
                "labeled": len(labels.rows),
                "skipped": len(labels.skipped),
                "classes": labels.counts(),
                "multi_label": self.journal.is_multi_label,
                "undoable": len(self.journal.effective),
                "features": 1.0 if self._features is not None else round(self._progress, 3),
                "error": self._error,
                "agreement": self._agreement,
                "curve": self._curve,
                "file": str(self.journal.table_path),
                "command": self.command,
            }

    @property
    def command(self) -> str:
        """The command that trains a classifier from the labels so far."""
        return f"finetune run {shlex.quote(str(self.journal.table_path))}"

    def contradictions(self) -> list[dict[str, Any]]:
        """Return labels that the head contradicts, the most doubtful first."""
        with self._lock:
            labels, scores = self.journal.labels, self._scores
            return [
                {
                    **self.text_of(row),
                    "label": self._label_of(labels.rows[row]),
                    "predicted": self._label_of(names) if names else [],
                    "doubt": round(doubt, 4),
                }
                for row, names, doubt in (find_contradictions(labels, scores) if scores else [])
            ]

    def search(self, class_name: str | None, words: str) -> list[dict[str, Any]]:
        """Return labeled texts of a class, or of all, that contain some words; the newest first."""
        with self._lock:
            labeled = [*reversed(self.journal.labels.rows.items())]
        words = words.casefold()
        matches = [
            {**self.text_of(row), "label": self._label_of(names)}
            for row, names in labeled
            if class_name is None or class_name in names
            if not words or any(words in column[row].casefold() for column in self.texts)
        ]
        return matches[:MAX_LISTED]

    # The background work.

    def _work(self) -> None:
        try:
            with sent_to(self._follow):
                features = normalize(self._read_features(self.texts))
            # The other cores are for the answers to the page.
            torch.set_num_threads(1)
            with self._lock:
                self._selection.set_features(features)
                self._features = features
            self._changed.set()
            while self._changed.wait() and not self._is_stopped:
                self._changed.clear()
                self._fit()
        except Exception as error:  # shown on the page; labeling continues without a head
            self._error = f"{type(error).__name__}: {error}"

    def _follow(self, event: Event) -> None:
        if isinstance(event, Advance):
            self._progress = event.done / event.total

    def _fit(self) -> None:
        with self._lock:
            labels = self.journal.labels
            rows, classes = dict(labels.rows), list(labels.classes)
        if missing := [name for name in classes if name not in self._name_features]:
            texts = [name_as_text(name) for name in missing]
            vectors = normalize(self._read_features([texts, texts][: len(self.texts)]))
            self._name_features |= dict(zip(missing, vectors, strict=True))
        fitted = {row: names for row, names in rows.items() if row not in self._random_rows}
        drawn = {row: names for row, names in rows.items() if row in self._random_rows}
        scores = self._fit_head(fitted, classes)
        agreement = measure_agreement(scores, drawn, labels=len(fitted))
        with self._lock:
            self._scores, self._agreement = scores, agreement
        if len(drawn) >= MIN_RANDOM_TEXTS and len(rows) % CURVE_EVERY == 0:
            self._curve = [*self._measure_curve(fitted, drawn, classes)]

    def _measure_curve(
        self, fitted: LabeledRows, drawn: LabeledRows, classes: Sequence[str]
    ) -> Iterator[dict[str, float]]:
        """Yield the agreement on all random texts of heads fitted on more and more labels."""
        in_order = list(fitted.items())
        sizes = np.linspace(0, len(in_order), CURVE_POINTS + 1).astype(int)[1:].tolist()
        for size in dict.fromkeys(sizes):
            scores = self._fit_head(dict(in_order[:size]), classes)
            if point := measure_agreement(scores, drawn, labels=size):
                yield point

    def _fit_head(self, rows: LabeledRows, classes: Sequence[str]) -> Scores | None:
        """Fit a head on labeled rows, and on the names of classes if they help."""
        if self._features is None or not classes:
            return None
        is_multi = self.journal.is_multi_label
        is_label = np.array([[name in names for name in classes] for names in rows.values()], bool)
        is_label = is_label.reshape(len(rows), len(classes))
        features = self._features[np.array([*rows], np.int64)]
        names = np.stack([self._name_features[name] for name in classes])
        has_label = is_label.any(axis=0)
        # A class without a label is known only by its name.
        by_name = np.flatnonzero(~has_label | names_help(names, features, is_label))
        features = np.concatenate([features, names[by_name]])
        is_label = np.concatenate([is_label, np.eye(len(classes), dtype=bool)[by_name]])
        known = np.flatnonzero(is_label.any(axis=0))
        if not len(known) or (len(known) < 2 and not is_multi):
            return None
        is_label = is_label[:, known]
        head = fit_linear_head(
            LabelledFeatures(
                features,
                is_label.astype(np.float32) if is_multi else is_label.argmax(axis=1),
                np.ones(len(features), np.float32),
                _multi_label_losses if is_multi else _single_label_losses,
                len(known),
                np.zeros(len(features), np.int64),
            ),
            inverse_regularization=DEFAULT_INVERSE_REGULARIZATION,
            max_gradient=MAX_GRADIENT,
        )
        logits = torch.from_numpy(head.logits(self._features))
        probabilities = logits.sigmoid() if is_multi else logits.softmax(dim=1)
        return Scores(tuple(np.array(classes)[known].tolist()), probabilities.numpy(), is_multi)


def names_help(names: Features, rows: Features, is_label: NDArray[np.bool_]) -> bool:
    """Return whether class names are meaningful to the encoder.

    Among classes with labels, at least half of the names must be nearest to the mean of their own
    class. With fewer than two such classes, names are used.
    """
    fits = names_fit(names, rows, is_label)
    return bool(fits.mean() >= MIN_FITTING_NAMES) if len(fits) > 1 else len(names) > 1


def measure_agreement(
    scores: Scores | None, drawn: LabeledRows, *, labels: int
) -> dict[str, float] | None:
    """Return how often a head agrees with a person on random texts, with the 95% interval."""
    if scores is None or not drawn:
        return None
    agreed = sum(set(scores.predict(row)[0]) == set(names) for row, names in drawn.items())
    low, high = map(float, wilson_interval(agreed, len(drawn)))
    return {"labels": labels, "texts": len(drawn), "agreed": agreed, "low": low, "high": high}


_single_label_losses = partial(functional.cross_entropy, reduction="none")


def _multi_label_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits), reduction="none"
    )
    return losses.sum(dim=1)
