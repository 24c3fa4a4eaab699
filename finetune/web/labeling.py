"""A labeling session: the labels of one person, and a head that learns from them in the background.

The head is fitted on the texts that were not drawn at random, as ``finetune run`` will be. The
random ones measure how often it agrees with the person.
"""

import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from finetune.events import Advance, Event, sent_to
from finetune.tasks.labels import name_as_text, name_classes
from finetune.tasks.tables import wilson_interval
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    LabelledFeatures,
    fit_linear_head,
)
from finetune.training.unlabeled import MIN_FITTING_NAMES, names_fit, normalize
from finetune.web.journal import Action, How, LabelJournal
from finetune.web.security import RequestError
from finetune.web.selection import Scores, Selection, find_contradictions

Features = NDArray[np.float32]
ReadFeatures = Callable[[Sequence[Sequence[str]]], Features]
"""Returns the features of columns of texts, one column or two of text pairs: [texts, hidden]."""

# Points of the curve of agreement, and the least number of random texts that it needs.
CURVE_POINTS, MIN_RANDOM_TEXTS = 8, 10
# After how many labels the curve is measured again.
CURVE_EVERY = 10
MAX_LISTED, MAX_NAME_CHARACTERS = 200, 200
# The penalized loss need not be exact for the order of texts.
MAX_GRADIENT = 1e-3


@dataclass(frozen=True)
class Agreement:
    """How often the head agrees with the person on texts drawn at random."""

    labels: int
    texts: int
    agreed: int

    def to_json(self) -> dict[str, Any]:
        """Return the counts, and the 95% interval of the fraction."""
        low, high = wilson_interval(self.agreed, self.texts)
        counts = {"labels": self.labels, "texts": self.texts, "agreed": self.agreed}
        return {**counts, "low": low, "high": high}


class LabelingSession:
    """What the page and the endpoints do. Rows are counted from 0.

    ``texts`` is a column of texts, or two columns of text pairs.
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
        has_label = np.zeros(self.count, bool) if is_blank is None else is_blank.copy()
        self._filled = self.count - int(has_label.sum())
        has_label[[row for row, how in journal.labels.how.items() if how == "file"]] = True
        self._selection = Selection(self.count, has_label=has_label)
        self._is_random = np.zeros(self.count, bool)
        self._is_random[self._selection.random_rows] = True
        self._lock = threading.RLock()
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._features: Features | None = None
        self._name_features: dict[str, NDArray[np.float32]] = {}
        self._scores: Scores | None = None
        self._shown: tuple[int, How] | None = None
        self._agreement: Agreement | None = None
        self._curve: list[Agreement] = []
        self.progress, self.error = 0.0, ""
        self._thread = threading.Thread(target=self._work, name="labeling", daemon=True)

    def start(self) -> None:
        """Compute features and fit heads in the background from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End the background work, and release the files."""
        self._stopped.set()
        self._changed.set()
        self.journal.close()

    # Called by the endpoints.

    def next(self) -> tuple[int, How] | None:
        """Return the row to label now: the same one until it is labeled or skipped."""
        with self._lock:
            labels = self.journal.labels
            if self._shown is None or self._shown[0] in labels.rows.keys() | labels.skipped:
                self._shown = self._selection.next(labels, self._scores)
            return self._shown

    def label(self, row: int, classes: Sequence[str] | None) -> None:
        """Give a row its classes, or skip it with None."""
        with self._lock:
            if not 0 <= row < self.count:
                raise RequestError(
                    404, f"there is no row {row + 1}: the rows are 1 to {self.count}"
                )
            how = self._how(row)
            if classes is None:
                action = Action("skip", row, how=how)
            else:
                names = tuple(dict.fromkeys(map(self.check_name, classes)))
                if not self.journal.is_multi_label and len(names) != 1:
                    raise RequestError(422, "this data has one class per text: send one label")
                action = Action("label", row, names, how)
            self._record(action)

    def _how(self, row: int) -> How:
        if self._is_random[row]:
            return "random"
        if self._shown is not None and self._shown[0] == row:
            return self._shown[1]
        return self.journal.labels.how.get(row, "chosen")

    def undo(self) -> int | None:
        """Take back the last action; return its row, which is shown again."""
        with self._lock:
            actions = self.journal.effective
            if not actions:
                raise RequestError(409, "there is nothing to undo")
            last = actions[-1]
            self._record(Action("undo"))
            if last.row is not None and last.row not in self.journal.labels.rows:
                self._shown = last.row, last.how or "chosen"
            return last.row

    def add_class(self, name: str) -> None:
        """Add a class."""
        with self._lock:
            self._record(Action("add", classes=(self.check_name(name),)))

    def rename_class(self, name: str, new_name: str) -> None:
        """Rename a class; one that is renamed as another is merged with it."""
        with self._lock:
            if name not in self.journal.labels.classes:
                raise RequestError(404, f"there is no class {name!r}")
            self._record(Action("rename", classes=(name,), new_name=self.check_name(new_name)))

    @staticmethod
    def check_name(name: str) -> str:
        """Return a class name as ``finetune run`` reads it."""
        name = name_classes([name])[name]
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise RequestError(422, f"a class name has 1 to {MAX_NAME_CHARACTERS} characters")
        return name

    def _record(self, action: Action) -> None:
        self.journal.record(action)
        self._changed.set()

    def suggestion(self, row: int) -> dict[str, Any] | None:
        """Return what the head predicts for a row."""
        if (scores := self._scores) is None:
            return None
        names, probability = scores.predict(row)
        return {"label": self.label_of(names), "probability": round(probability, 4)}

    def label_of(self, names: Sequence[str]) -> str | list[str]:
        """Return classes as the endpoints give them: a name, or a list of names."""
        return [*names] if self.journal.is_multi_label else names[0]

    def text_of(self, row: int) -> dict[str, Any]:
        """Return the number of a row, counted from 1, and its texts."""
        texts = zip(("text", "text_pair"), self.texts, strict=False)
        return {"row": row + 1, **{name: column[row] for name, column in texts}}

    def status(self) -> dict[str, Any]:
        """Return counts, the progress of the features, and how often the head agrees."""
        with self._lock:
            labels = self.journal.labels
            labeled = len(labels.rows)
            return {
                "texts": self._filled,
                "labeled": labeled,
                "skipped": len(labels.skipped),
                "classes": labels.counts(),
                "multi_label": self.journal.is_multi_label,
                "undoable": len(self.journal.effective),
                "features": 1.0 if self._features is not None else round(self.progress, 3),
                "error": self.error,
                "agreement": self._agreement and self._agreement.to_json(),
                "curve": [point.to_json() for point in self._curve],
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
            labels = self.journal.labels
            found = find_contradictions(labels, self._scores) if self._scores else []
            return [
                {
                    **self.text_of(row),
                    "label": self.label_of(labels.rows[row]),
                    "predicted": self.label_of(names) if names else [],
                    "doubt": round(doubt, 4),
                }
                for row, names, doubt in found
            ]

    def search(self, class_name: str | None, words: str) -> list[dict[str, Any]]:
        """Return labeled texts of a class, or of all, that contain some words; the newest first."""
        with self._lock:
            rows = [
                (row, names)
                for row, names in reversed(self.journal.labels.rows.items())
                if class_name is None or class_name in names
            ]
        words = words.casefold()
        found = [
            {**self.text_of(row), "label": self.label_of(names)}
            for row, names in rows
            if not words or any(words in column[row].casefold() for column in self.texts)
        ]
        return found[:MAX_LISTED]

    # The background work.

    def _work(self) -> None:
        try:
            with sent_to(self._follow):
                features = normalize(self._read_features(self.texts))
            with self._lock:
                self._selection.set_features(features)
                self._features = features
            self._changed.set()
            while not self._stopped.is_set():
                self._changed.wait()
                self._changed.clear()
                if not self._stopped.is_set():
                    self._fit()
        except Exception as error:  # shown on the page; labeling continues without a head
            self.error = f"{type(error).__name__}: {error}"

    def _follow(self, event: Event) -> None:
        if isinstance(event, Advance):
            self.progress = event.done / event.total

    def _fit(self) -> None:
        with self._lock:
            labels = self.journal.labels
            rows, classes = dict(labels.rows), list(labels.classes)
        missing = [name for name in classes if name not in self._name_features]
        if missing:
            texts = [name_as_text(name) for name in missing]
            vectors = normalize(self._read_features([texts, texts][: len(self.texts)]))
            self._name_features |= dict(zip(missing, vectors, strict=True))
        fitted = {row: names for row, names in rows.items() if not self._is_random[row]}
        scores = self._fit_head(fitted, classes)
        drawn = {row: names for row, names in rows.items() if self._is_random[row]}
        agreement = _agreement(scores, drawn, labels=len(fitted))
        with self._lock:
            self._scores, self._agreement = scores, agreement
        if len(drawn) >= MIN_RANDOM_TEXTS and len(rows) % CURVE_EVERY == 0:
            self._curve = self._measure_curve(fitted, drawn, classes)

    def _measure_curve(
        self,
        fitted: Mapping[int, tuple[str, ...]],
        drawn: Mapping[int, tuple[str, ...]],
        classes: Sequence[str],
    ) -> list[Agreement]:
        """Return the agreement on all random texts of heads fitted on ever more labels."""
        in_order = list(fitted.items())
        sizes = np.unique(np.linspace(0, len(in_order), CURVE_POINTS + 1).astype(int)[1:])
        points = (
            _agreement(self._fit_head(dict(in_order[:size]), classes), drawn, labels=size)
            for size in sizes.tolist()
        )
        return [point for point in points if point]

    def _fit_head(
        self, rows: Mapping[int, tuple[str, ...]], classes: Sequence[str]
    ) -> Scores | None:
        """Fit a head on labeled rows, and on the names of classes if they help."""
        assert self._features is not None
        numbers = np.array([*rows], np.int64)
        is_label = np.array([[name in names for name in classes] for names in rows.values()], bool)
        is_label = is_label.reshape(len(rows), len(classes))
        features = self._features[numbers]
        vectors, has_label = self._name_vectors(classes), is_label.any(axis=0)
        # A class without a label is known only by its name.
        named = np.flatnonzero(~has_label | names_help(vectors, features, is_label))
        if len(named):
            features = np.concatenate([features, vectors[named]])
            is_label = np.concatenate([is_label, np.eye(len(classes), dtype=bool)[named]])
        known = np.flatnonzero(is_label.any(axis=0))
        if not len(known) or (len(known) < 2 and not self.journal.is_multi_label):
            return None
        is_label = is_label[:, known]
        multi = self.journal.is_multi_label
        head = fit_linear_head(
            LabelledFeatures(
                features,
                is_label.astype(np.float32) if multi else is_label.argmax(axis=1),
                np.ones(len(features), np.float32),
                _multi_label_losses
                if multi
                else partial(functional.cross_entropy, reduction="none"),
                len(known),
                np.zeros(len(features), np.int64),
            ),
            inverse_regularization=DEFAULT_INVERSE_REGULARIZATION,
            max_gradient=MAX_GRADIENT,
        )
        logits = torch.from_numpy(head.logits(self._features))
        probabilities = logits.sigmoid() if multi else logits.softmax(dim=1)
        return Scores(tuple(np.array(classes)[known].tolist()), probabilities.numpy(), multi)

    def _name_vectors(self, classes: Sequence[str]) -> Features:
        vectors = [self._name_features[name] for name in classes]
        return np.stack(vectors) if vectors else np.empty((0, 1), np.float32)


def names_help(names: Features, rows: Features, is_label: NDArray[np.bool_]) -> bool:
    """Return whether class names are meaningful to the encoder.

    Among classes with labels, more than half of the names must be nearest to the mean of their own
    class. With fewer than two such classes, names are used.
    """
    fits = names_fit(names, rows, is_label)
    return bool(fits.mean() > MIN_FITTING_NAMES) if len(fits) > 1 else len(names) > 1


def _agreement(
    scores: Scores | None, drawn: Mapping[int, tuple[str, ...]], *, labels: int
) -> Agreement | None:
    if scores is None or not drawn:
        return None
    agreed = sum(set(scores.predict(row)[0]) == set(names) for row, names in drawn.items())
    return Agreement(labels, len(drawn), agreed)


def _multi_label_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits), reduction="none"
    )
    return losses.sum(dim=1)
