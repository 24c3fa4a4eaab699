"""A labeling session: the labels of one person, and a head that learns from them in the background.

The head is fitted on the texts that were not drawn at random, as ``finetune run`` will be. The
random texts measure how often the head agrees with the person.
"""

import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from finetune.web.journal import Action, How, LabelJournal, Labels
from finetune.web.server import StrictBody, make_app, route

Features = NDArray[np.float32]
LabeledRows = Mapping[int, Sequence[str]]
ReadFeatures = Callable[[Sequence[Sequence[str]]], Features]
"""Returns the features of one column of texts, or of two columns of pairs: [texts, hidden]."""

# Points of the curve of agreement, the least number of random texts that it needs, and after how
# many labels it is measured again.
CURVE_POINTS, MIN_RANDOM_TEXTS, CURVE_EVERY = 8, 10, 10
MAX_LISTED, MAX_CONTRADICTIONS, MAX_NAME_CHARACTERS = 200, 50, 200
# A rough fit is enough to rank texts.
MAX_GRADIENT = 1e-3
SPREAD_TEXTS = 20
# The ways of choosing after that, again and again.
TURNS: tuple[How, ...] = ("uncertain", "rare", "uncertain", "random")
RANDOM_FRACTION, MAX_RANDOM_TEXTS = 0.25, 1_000
# The text shown is, among this many least certain ones, the least similar to labeled texts.
UNCERTAIN_TEXTS = 5


class LabelBody(StrictBody):
    """A label, a list of labels for multi-label data, or null to skip the row."""

    row: int
    label: str | list[str] | None


class ClassBody(StrictBody):
    """A class to add; with ``new_name``, a class to rename or to merge."""

    name: str
    new_name: str | None = None


@dataclass(frozen=True)
class Scores:
    """Predictions of the head for all texts: probabilities are float32 [texts, classes]."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    is_multi_label: bool

    @cached_property
    def margins(self) -> NDArray[np.float32]:
        """How far each text is from being undecided: [texts]."""
        if self.is_multi_label:
            return np.asarray(np.abs(self.probabilities - 0.5).min(axis=1))
        best = np.partition(self.probabilities, -2, axis=1)[:, -2:]
        return np.asarray(best[:, 1] - best[:, 0])

    def predict(self, row: int) -> tuple[tuple[str, ...], float]:
        """Return the predicted classes of a text, and how probable they are."""
        row_probabilities = self.probabilities[row]
        if not self.is_multi_label:
            best = int(row_probabilities.argmax())
            return (self.classes[best],), float(row_probabilities[best])
        is_likely = row_probabilities > 0.5
        certain = np.where(is_likely, row_probabilities, 1 - row_probabilities)
        return tuple(np.array(self.classes)[is_likely].tolist()), float(certain.min())


class Selection:
    """Chooses which text is labeled next.

    First come texts that are spread out over the features (k-means++), then in turn the two texts
    that the head is least certain of, the most likely text of the class with the fewest labels, and
    a text drawn at random. The random texts are drawn once, and no other way of choosing shows
    them. So they stay a fair sample, and only they measure how good the model is.

    ``features`` are unit vectors, float32 [texts, hidden], once there are any.
    """

    def __init__(self, is_done: NDArray[np.bool_]) -> None:
        self._random = np.random.default_rng(0)
        order = self._random.permutation(len(is_done))
        order = order[~is_done[order]]
        drawn = min(int(np.ceil(len(order) * RANDOM_FRACTION)), MAX_RANDOM_TEXTS)
        self.random_rows, self._other_rows = order[:drawn], order[drawn:]
        self._spread_rows: NDArray[np.int64] = order[:0]
        self._features: Features | None = None

    def set_features(self, features: NDArray[np.float32]) -> None:
        """Use features from now on, first to draw rows as k-means++ draws its centers."""
        self._features, rows = features, self._other_rows
        distances, chosen = np.ones(len(rows)), list[int]()
        while len(chosen) < SPREAD_TEXTS and (total := distances.sum()):
            chosen.append(int(self._random.choice(len(rows), p=distances / total)))
            similarities = features[rows] @ features[rows[chosen[-1]]]
            distances = np.minimum(distances, np.maximum(1 - similarities, 0))
            distances[chosen] = 0
        self._spread_rows = rows[chosen]

    def next(self, labels: Labels, scores: Scores | None) -> tuple[int, How] | None:
        """Return a row without a label and how it was chosen; None if every row has been shown."""
        seen = np.array([*labels.rows, *labels.skipped], np.int64)
        random_rows, rows, spread_rows = (
            candidates[~np.isin(candidates, seen)]
            for candidates in (self.random_rows, self._other_rows, self._spread_rows)
        )
        done = sum(how != "file" for how in labels.how.values()) + len(labels.skipped)
        if len(spread_rows) and (scores is None or done < SPREAD_TEXTS):
            return int(spread_rows[0]), "spread"
        how = TURNS[done % len(TURNS)]
        if len(random_rows) and (how == "random" or not len(rows)):
            return int(random_rows[0]), "random"
        if not len(rows):
            return None
        if scores is None or self._features is None:
            return int(rows[0]), "spread"
        if how == "rare":
            counts = labels.counts()
            rarest = min(scores.classes, key=lambda name: counts.get(name, 0))
            probabilities = scores.probabilities[rows, scores.classes.index(rarest)]
            return int(rows[probabilities.argmax()]), "rare"
        uncertain = rows[np.argsort(scores.margins[rows], kind="stable")[:UNCERTAIN_TEXTS]]
        if labels.rows:
            labeled = self._features[np.array([*labels.rows])]
            similarities = self._features[uncertain] @ labeled.T
            uncertain = uncertain[[similarities.max(axis=1).argmin()]]
        return int(uncertain[0]), "uncertain"


class LabelingSession:
    """What the endpoints do. They count rows from 1, all else from 0."""

    def __init__(self, journal: LabelJournal, read_features: ReadFeatures) -> None:
        self.journal, self._read_features = journal, read_features
        self.texts, self._is_multi = journal.source.texts, journal.source.is_multi_label
        is_done = journal.source.is_blank
        self._filled = int((~is_done).sum())
        is_done[[*journal.source.labels.rows]] = True
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
        row, count = body.row - 1, len(self.texts[0])
        if not 0 <= row < count:
            raise HTTPException(404, f"there is no row {body.row}: the rows are 1 to {count}")
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
            if not self._is_multi and len(names) != 1:
                raise HTTPException(422, "this data has one class per text: send one label")
            return self._record(Action("label", row, names, how))

    def undo(self, body: StrictBody) -> dict[str, Any]:
        """Take back the last action; return the status, and the row, which is shown again."""
        with self._lock:
            if not self.journal.actions:
                raise HTTPException(409, "there is nothing to undo")
            last = self.journal.actions[-1]
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
        return [*names] if self._is_multi else names[0]

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
                "multi_label": self._is_multi,
                "undoable": len(self.journal.actions),
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
            if scores is None:
                return []
            known = {
                row: names for row, names in labels.rows.items() if {*names} <= {*scores.classes}
            }
            is_label = mark_labels(known.values(), scores.classes)
            probabilities = scores.probabilities[[*known]]
            doubts = np.where(is_label, 1 - probabilities, probabilities).max(axis=1, initial=0)
            doubtful = np.array([*known])[np.argsort(-doubts, kind="stable")][:MAX_CONTRADICTIONS]
            predicted = {row: scores.predict(row)[0] for row in doubtful.tolist()}
            return [
                {
                    **self._text_of(row),
                    "label": self._label_of(known[row]),
                    "predicted": self._label_of(names),
                }
                for row, names in predicted.items()
                if {*names} != {*known[row]}
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
        if self._features is None or len(classes) < 2 - self._is_multi:
            return None
        is_label, features = mark_labels(rows.values(), classes), self._features[[*rows]]
        names = np.stack([self._name_features[name] for name in classes])
        # Names help if at least half of them are nearest to the mean of their own class. Two
        # classes with labels are needed to tell.
        fits = names_fit(names, features, is_label)
        names_help = len(fits) < 2 or fits.mean() >= MIN_FITTING_NAMES
        # A class without a label is known only by its name.
        by_name = np.flatnonzero(~is_label.any(axis=0) | names_help)
        features = np.concatenate([features, names[by_name]])
        is_label = np.concatenate([is_label, np.eye(len(classes), dtype=bool)[by_name]])
        task = Multi(classes) if self._is_multi else Single(classes)
        labeled = LabelledFeatures(
            features,
            is_label.astype(np.float32) if self._is_multi else is_label.argmax(axis=1),
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
        return Scores(tuple(classes), probabilities, self._is_multi)


def mark_labels(rows: Collection[Sequence[str]], classes: Sequence[str]) -> NDArray[np.bool_]:
    """Return which of some classes the rows have: [rows, classes]."""
    marks = [[name in names for name in classes] for names in rows]
    return np.array(marks, bool).reshape(len(rows), len(classes))


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
    session: LabelingSession, *, name: str, hosts: Collection[str], token: str
) -> ASGIApp:
    """Return the application; ``name`` is the name of the labeled file."""

    async def search(request: Request) -> Response:
        query: Any = request.query_params
        return JSONResponse(session.search(query.get("class"), query.get("search", "")))

    source = session.journal.source
    page = {"name": name, "count": len(source.texts[0]), "multi_label": source.is_multi_label}
    routes = [
        route("/api/next", session.next),
        route("/api/label", session.label, LabelBody),
        route("/api/undo", session.undo, StrictBody),
        route("/api/classes", session.change_class, ClassBody),
        route("/api/status", session.status),
        route("/api/contradictions", session.contradictions),
        Route("/api/texts", search),
    ]
    return make_app(routes, name="label", page=page, hosts=hosts, token=token)
