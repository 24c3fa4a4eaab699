"""A labeling session: the labels of one person, and a head that learns from them in the background.

The head is fitted on the texts that were not drawn at random, as ``finetune run`` will be. The
random texts measure how often the head agrees with the person.
"""

import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from finetune.events import Advance, Event, sent_to
from finetune.tasks.labels import name_as_text, name_classes
from finetune.tasks.multi import Multi
from finetune.tasks.single import Single
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
from finetune.web.server import StrictBody, make_app, route

Features = NDArray[np.float32]
LabeledRows = Mapping[int, Sequence[str]]
ReadFeatures = Callable[[Sequence[Sequence[str]]], Features]
"""Returns the features of one column of texts, or of two columns of pairs: [texts, hidden]."""

# Points of the curve of agreement, the least number of random texts that it needs, and after how
# many labels it is measured again.
CURVE_POINTS, MIN_RANDOM_TEXTS, CURVE_EVERY = 8, 10, 10
MAX_LISTED, MAX_NAME_CHARACTERS = 200, 200
# A rough fit is enough to rank texts.
MAX_GRADIENT = 1e-3


class LabelBody(StrictBody):
    """A label, a list of labels for multi-label data, or null to skip the row."""

    row: int
    label: str | list[str] | None


class ClassBody(StrictBody):
    """A class to add; with ``new_name``, a class to rename or to merge."""

    name: str
    new_name: str | None = None


class LabelingSession:
    """What the endpoints do.

    ``texts`` is a column of texts, or two columns of sentence pairs. Endpoints count rows from 1,
    all else from 0.
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
        self._selection = Selection(is_done)
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
        self._thread = threading.Thread(target=self._work, name="labeling", daemon=True)

    def start(self) -> None:
        """Compute features and fit heads in the background from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End the background work, and release the files."""
        self._is_stopped = True
        self._changed.set()
        self.journal.close()

    def next(self) -> dict[str, Any]:
        """Return the text to label now: the same one until it is labeled or skipped."""
        with self._lock:
            labels, scores = self.journal.labels, self._scores
            if self._shown is None or self._shown[0] in labels.rows.keys() | labels.skipped:
                self._shown = self._selection.next(labels, scores)
            if self._shown is None:
                raise HTTPException(404, "all texts are labeled or skipped")
            row, how = self._shown
            suggestion = None
            if scores is not None:
                names, probability = scores.predict(row)
                suggestion = {"label": self._label_of(names), "probability": round(probability, 4)}
            return {**self._text_of(row), "how": how, "suggestion": suggestion}

    def label(self, body: LabelBody) -> dict[str, Any]:
        """Give a row its classes, or skip it; return the status."""
        row = body.row - 1
        if not 0 <= row < self.count:
            raise HTTPException(404, f"there is no row {body.row}: the rows are 1 to {self.count}")
        with self._lock:
            how: How = self.journal.labels.how.get(row, "chosen")
            if row in self._random_rows:
                how = "random"
            elif self._shown is not None and self._shown[0] == row:
                how = self._shown[1]
            if body.label is None:
                return self._record(Action("skip", row, how=how))
            labels = [body.label] if isinstance(body.label, str) else body.label
            names = tuple(dict.fromkeys(map(check_name, labels)))
            if not self.journal.is_multi_label and len(names) != 1:
                raise HTTPException(422, "this data has one class per text: send one label")
            return self._record(Action("label", row, names, how))

    def undo(self, body: StrictBody) -> dict[str, Any]:
        """Take back the last action; return the status, and the row, which is shown again."""
        with self._lock:
            actions = self.journal.effective
            if not actions:
                raise HTTPException(409, "there is nothing to undo")
            last = actions[-1]
            status = self._record(Action("undo"))
            if last.row is None:
                return {"row": None, **status}
            if last.row not in self.journal.labels.rows:
                self._shown = last.row, last.how or "chosen"
            return {"row": last.row + 1, **status}

    def change_class(self, body: ClassBody) -> dict[str, Any]:
        """Add a class or rename it; renaming it to an existing class merges the two."""
        with self._lock:
            if body.new_name is None:
                return self._record(Action("add", classes=(check_name(body.name),)))
            if body.name not in self.journal.labels.classes:
                raise HTTPException(404, f"there is no class {body.name!r}")
            new_name = check_name(body.new_name)
            return self._record(Action("rename", classes=(body.name,), new_name=new_name))

    def _record(self, action: Action) -> dict[str, Any]:
        self.journal.record(action)
        self._changed.set()
        return self.status()

    def _label_of(self, names: Sequence[str]) -> str | list[str]:
        """Return classes as the endpoints return them: a name, or a list of names."""
        return [*names] if self.journal.is_multi_label else names[0]

    def _text_of(self, row: int) -> dict[str, Any]:
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
                    **self._text_of(row),
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
            {**self._text_of(row), "label": self._label_of(names)}
            for row, names in labeled
            if not class_name or class_name in names
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
        is_multi = self.journal.is_multi_label
        if self._features is None or len(classes) < 2 - is_multi:
            return None
        is_label = np.array([[name in names for name in classes] for names in rows.values()], bool)
        is_label = is_label.reshape(len(rows), len(classes))
        features = self._features[np.array([*rows], np.int64)]
        names = np.stack([self._name_features[name] for name in classes])
        # Names help if at least half of them are nearest to the mean of their own class. Two
        # classes with labels are needed to tell.
        fits = names_fit(names, features, is_label)
        names_help = len(fits) < 2 or fits.mean() >= MIN_FITTING_NAMES
        # A class without a label is known only by its name.
        by_name = np.flatnonzero(~is_label.any(axis=0) | names_help)
        features = np.concatenate([features, names[by_name]])
        is_label = np.concatenate([is_label, np.eye(len(classes), dtype=bool)[by_name]])
        task = Multi(classes) if is_multi else Single(classes)
        labeled = LabelledFeatures(
            features,
            is_label.astype(np.float32) if is_multi else is_label.argmax(axis=1),
            np.ones(len(features), np.float32),
            task.losses,
            len(classes),
            np.zeros(len(features), np.int64),
        )
        head = fit_linear_head(
            labeled,
            inverse_regularization=DEFAULT_INVERSE_REGULARIZATION,
            max_gradient=MAX_GRADIENT,
        )
        probabilities = task.read_logits(head.logits(self._features)).probabilities
        assert probabilities is not None
        return Scores(tuple(classes), probabilities, is_multi)


def check_name(name: str) -> str:
    """Return a class name as ``finetune run`` reads it."""
    name = name_classes([name])[name]
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise HTTPException(422, f"a class name has 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def measure_agreement(
    scores: Scores | None, drawn: LabeledRows, *, labels: int
) -> dict[str, float] | None:
    """Return how often a head agrees with a person on random texts, with the 95% interval."""
    if scores is None or not drawn:
        return None
    agreed = sum(set(scores.predict(row)[0]) == set(names) for row, names in drawn.items())
    low, high = map(float, wilson_interval(agreed, len(drawn)))
    return {"labels": labels, "texts": len(drawn), "agreed": agreed, "low": low, "high": high}


def make_label_app(
    session: LabelingSession, *, page: str, hosts: Collection[str], token: str
) -> ASGIApp:
    """Return the application; ``page`` is the HTML of the page."""

    async def search(request: Request) -> Response:
        query: Any = request.query_params
        return JSONResponse(session.search(query.get("class"), query.get("search", "")))

    routes = [
        route("/api/next", session.next),
        route("/api/label", session.label, LabelBody),
        route("/api/undo", session.undo, StrictBody),
        route("/api/classes", session.change_class, ClassBody),
        route("/api/status", session.status),
        route("/api/contradictions", session.contradictions),
        Route("/api/texts", search),
    ]
    return make_app(routes, page=page, script="label.js", hosts=hosts, token=token)
