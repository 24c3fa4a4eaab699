"""A labeling session: one user's labels, and a head fitted on them in the background.

The head is fitted on the texts that were not drawn at random, like in ``finetune run``. The
random texts measure how often the head agrees with the user.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from finetune.data.labeling_tools import How
from finetune.errors import explain
from finetune.evaluation.explain import COLUMNS
from finetune.evaluation.explain import explain as explain_predictions
from finetune.events import Advance, Event, WarningMessage, emit, sent_to
from finetune.runs.linear_head import measure_first
from finetune.tasks.base import Logits, Task
from finetune.tasks.explanation import decisive, split_at_words
from finetune.tasks.labels import name_as_text, name_classes
from finetune.tasks.metrics import METRICS, MULTI
from finetune.tasks.multi import Multi
from finetune.tasks.single import Single
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    MAX_TEXTS,
    MIN_FITTING_NAMES,
    LabeledFeatures,
    LinearHead,
    fit_linear_head,
    mean_by_class,
    names_fit,
    normalize,
)
from finetune.training.prototypes import Prototypes
from finetune.web.journal import Action, LabelJournal, Labels
from finetune.web.server import StrictBody, make_app, route

Features = NDArray[np.float32]
LabeledRows = Mapping[int, Sequence[str]]
ReadFeatures = Callable[[Sequence[Sequence[str]]], Features]
"""Returns the features of a text column, or of two columns for pairs: [texts, hidden]."""

# Number of last suggestions for which the agreement is reported.
LAST_SUGGESTIONS = 30
MAX_LISTED, MAX_CONTRADICTIONS, MAX_NAME_CHARACTERS = 200, 50, 200
# Longer texts are not explained, because each word costs a pass over the text.
MAX_EXPLAINED_CHARACTERS = 500
# A rough fit is enough to rank texts.
MAX_GRADIENT = 1e-3
# Prototypes of the classes choose this many texts, and suggest classes until the head has as many
# to learn from. Then the head is better
# (docs/measurements.md#start-up-whole-commands-label-and-serve).
FIRST_TEXTS = 20
# The first texts come from this fraction of the texts that each class would have if classes were
# equally frequent.
CERTAIN_PART = 0.2
# After that, how texts are chosen, in turn.
TURNS: tuple[How, ...] = ("uncertain", "rare", "uncertain", "random")
MAX_RANDOM_TEXTS = 1_000
# Among this many least certain texts, show the text least similar to labeled texts.
UNCERTAIN_TEXTS = 5


class LabelBody(StrictBody):
    """A label, a list of labels for multi-label data, or null to skip the row.

    ``was`` is the label, or null, that the row had on the user's page.
    """

    row: int
    label: str | list[str] | None
    was: str | list[str] | None = None


class UndoBody(StrictBody):
    """The number of actions that could be undone, according to the user's page."""

    undoable: int | None = None


class ClassBody(StrictBody):
    """A class to add or, with ``new_name``, to rename or merge. An empty name deletes it."""

    name: str
    new_name: str | None = None


@dataclass(frozen=True)
class HeadOutput:
    """Predictions of the head for all texts: logits are float32 [texts, classes]."""

    task: Task
    logits: NDArray[np.float32]
    head: LinearHead

    @cached_property
    def probabilities(self) -> NDArray[np.float32]:
        """The probability of each class: float32 [texts, classes]."""
        return cast(NDArray[np.float32], self.task.read_logits(self.logits).probabilities)

    @cached_property
    def margins(self) -> NDArray[np.float32]:
        """The margin of each prediction: [texts]."""
        if self.task.problem_type == MULTI:
            return np.asarray(np.abs(self.probabilities - 0.5).min(axis=1))
        best = np.partition(self.probabilities, -2, axis=1)[:, -2:]
        return np.asarray(best[:, 1] - best[:, 0])

    def predict(self, row: int) -> tuple[tuple[str, ...], float]:
        """Return the predicted classes of a text and their probability."""
        [names] = self.task.to_json(self.task.read_logits(self.logits[row : row + 1]).predicted)
        probabilities = self.probabilities[row]
        if self.task.problem_type != MULTI:
            return (names,), float(probabilities.max())
        return (*names,), float(np.maximum(probabilities, 1 - probabilities).min())


class Selection:
    """Chooses the next text to label.

    First come texts of each class in turn, spread out over those that most likely have the class.
    Then come in turn two texts that the head is least certain of, the most likely text of the class
    with the fewest labels, and a text drawn at random. The random texts are the first ones of
    ``order``, which is random, and no other way of choosing shows them. So they stay a fair sample,
    and only they measure how good the model is.

    ``features`` are unit vectors, float32 [texts, hidden], once there are any.
    """

    features: Features | None = None

    def __init__(self, order: NDArray[np.int64], *, random_fraction: float) -> None:
        drawn = min(int(np.ceil(len(order) * random_fraction)), MAX_RANDOM_TEXTS)
        self.random_rows, self._other_rows = order[:drawn], order[drawn:]

    def next(self, labels: Labels, output: HeadOutput | None) -> tuple[int, How] | None:
        """Return an unlabeled row and how it was chosen, or None if every row has been shown."""
        seen = np.array([*labels.rows, *labels.skipped], np.int64)
        random_rows, rows = (
            candidates[~np.isin(candidates, seen)]
            for candidates in (self.random_rows, self._other_rows)
        )
        done = len(labels.rows) + len(labels.skipped)
        how = TURNS[done % len(TURNS)] if output is None or done >= FIRST_TEXTS else "spread"
        if len(random_rows) and (how == "random" or not len(rows)):
            return int(random_rows[0]), "random"
        if not len(rows):
            return None
        if output is None or self.features is None:
            return int(rows[0]), "spread"
        classes = output.task.class_names
        if how == "uncertain":
            order, count = output.margins[rows], UNCERTAIN_TEXTS
        else:
            if how == "rare":
                counts = labels.counts()
                name, count = min(classes, key=lambda name: counts.get(name, 0)), 1
            else:
                # If the class order were known, users could guess the next class.
                turns = np.random.default_rng(done // len(classes)).permutation(len(classes))
                name = classes[turns[done % len(classes)]]
                count = max(int(CERTAIN_PART * len(rows) / len(classes)), 1)
            order = -output.probabilities[rows, output.task.class_numbers[name]]
        candidates = rows[np.argsort(order, kind="stable")[:count]]
        if known := [row for row in labels.rows if row < len(self.features)]:
            similarities = self.features[candidates] @ self.features[known].T
            candidates = candidates[[similarities.max(axis=1).argmin()]]
        return int(candidates[0]), how


class LabelingSession:
    """The actions behind the endpoints. Endpoints count rows from 1, everything else from 0.

    The model reads a class's ``descriptions``, if any, instead of its name. ``command`` returns
    the command that trains a classifier from the labels so far.
    """

    def __init__(
        self,
        journal: LabelJournal,
        read_features: ReadFeatures | None = None,
        *,
        descriptions: Mapping[str, Sequence[str]] = MappingProxyType({}),
        command: Callable[[], str] = str,
    ) -> None:
        self.journal, self._read_features, self.command = journal, read_features, command
        self._descriptions = descriptions
        self.texts, self._is_multi = journal.source.texts, journal.source.is_multi_label
        self._is_blank = journal.source.is_blank
        is_done = self._is_blank.copy()
        is_done[[*journal.source.labels.rows]] = True
        order = journal.order
        # Texts for the prototypes.
        self._sample = order[~self._is_blank[order]][:MAX_TEXTS]
        self._selection = Selection(order[~is_done[order]], random_fraction=journal.random_fraction)
        self._lock, self._reads = threading.RLock(), threading.Lock()
        self._changed, self._is_stopped = threading.Event(), False
        self._features: Features | None = None
        self._name_features: dict[str, NDArray[np.float32]] = {}
        self._output: HeadOutput | None = None
        self._shown: tuple[int, How] | None = None
        self._agreement: dict[str, Any] | None = None
        self._progress, self._error = float(read_features is None), ""

    def start(self) -> None:
        """Start computing features and fitting heads in the background."""
        if self._read_features is not None:
            work = partial(copy_context().run, self._work, self._read_features)
            threading.Thread(target=work, name="labeling", daemon=True).start()

    def stop(self) -> None:
        """Stop the background work and release the files."""
        self._is_stopped = True
        self._changed.set()
        self.journal.close()

    def next(self, number: int | None = None) -> dict[str, Any]:
        """Return the text to label, the same text until it is labeled or skipped.

        A row number returns this row, even if it has a label.
        """
        with self._lock:
            labels = self.journal.labels
            if number is not None:
                row = self._row_of(number)
                self._shown = row, labels.how.get(row, "chosen")
            elif self._shown is None or self._shown[0] in labels.rows.keys() | labels.skipped:
                self._shown = self._selection.next(labels, self._output)
            if self._shown is None:
                raise HTTPException(404, "all texts are labeled or skipped")
            row, how = self._shown
            suggested = self._suggest(row)
            suggestion = suggested and {
                "label": self._label_of(suggested[0]),
                "probability": round(suggested[1], 4),
            }
            return {**self._text_of(row), "how": how, "suggestion": suggestion}

    def _suggest(self, row: int) -> tuple[tuple[str, ...], float] | None:
        """Return the suggested classes and their probability."""
        if self._output is not None and row < len(self._output.logits):
            return self._output.predict(row)
        return self.journal.suggestions.get(row)

    def mark_words(self, number: int) -> dict[str, Any]:
        """Return the suggestion for a row, and its texts in pieces: those that speak for it marked.

        Nothing is marked in a long text, or if another text is shown by now.
        """
        row = self._row_of(number)
        texts = {name: column[row] for name, column in zip(COLUMNS, self.texts, strict=False)}
        with self._reads:
            with self._lock:
                output, suggested = self._output, self._suggest(row)
                is_shown = self._shown is not None and self._shown[0] == row
            marked = dict.fromkeys(texts, self.journal.words.get(row, set[str]()))
            is_short = sum(map(len, texts.values())) <= MAX_EXPLAINED_CHARACTERS
            if output and suggested and is_shown and is_short:
                marked = self._explain(row, output, texts)
        pieces = {name: split_at_words(text, marked[name]) for name, text in texts.items()}
        return {"label": suggested and self._label_of(suggested[0]), **pieces}

    def _explain(
        self, row: int, output: HeadOutput, texts: Mapping[str, str]
    ) -> dict[str, set[str]]:
        """Return the lowercase words of each text that support the suggestion."""
        read = self._read_features
        assert read is not None

        def predict(*columns: Sequence[str] | None) -> Logits:
            features = read([column for column in columns if column is not None])
            return output.head.logits(normalize(features))

        logits, columns = output.logits[row : row + 1], [[text] for text in texts.values()]
        [changes] = explain_predictions(output.task, predict, logits, *columns)
        return {name: decisive(c for c in changes if c.column in (None, name)) for name in texts}

    def _row_of(self, number: int) -> int:
        if 0 < number <= len(self._is_blank) and not self._is_blank[number - 1]:
            return number - 1
        raise HTTPException(404, f"row {number} has no text: there are {len(self._is_blank)} rows")

    def label(self, body: LabelBody) -> dict[str, Any]:
        """Label a row with classes, or skip it. Return the status."""
        row = self._row_of(body.row)
        with self._lock:
            self.journal.take_edits()
            is_random = row in self._selection.random_rows
            shown, shown_how = self._shown or (None, None)
            how = self.journal.labels.how.get(row) or (
                "random" if is_random else shown_how if shown == row else "chosen"
            )
            now = self._text_of(row)["label"]
            if "was" in body.model_fields_set and now != body.was:
                raise HTTPException(412, f"row {body.row} now has the label {now!r}")
            if body.label is None:
                return self._record(Action("skip", row, how=how))
            labels = [body.label] if isinstance(body.label, str) else body.label
            names = tuple(dict.fromkeys(map(check_name, labels)))
            if not self._is_multi and len(names) != 1:
                raise HTTPException(422, "this data has one class per text: send one label")
            if unknown := {*names} - {*self.journal.labels.classes}:
                raise HTTPException(422, f"unknown class {min(unknown)!r}: add it first")
            suggested = None if row in self.journal.labels.rows else self._suggest(row)
            agrees = suggested and {*suggested[0]} == {*names}
            return self._record(Action("label", row, names, how, agrees=agrees))

    def undo(self, body: UndoBody) -> dict[str, Any]:
        """Undo the last action. Return the status and the row, which is shown again."""
        with self._lock:
            self.journal.take_edits()
            if not (count := len(self.journal.actions)):
                raise HTTPException(409, "nothing to undo")
            if body.undoable not in (None, count):
                raise HTTPException(412, "there were other actions since this page was updated")
            last = self.journal.actions[-1]
            status = self._record(Action("undo"))
            if last.row is None:
                return {"row": None, **status}
            if last.row not in self.journal.labels.rows:
                self._shown = last.row, last.how or "chosen"
            return {"row": last.row + 1, **status}

    def change_class(self, body: ClassBody) -> dict[str, Any]:
        """Add a class, rename it, merge it into an existing one, or delete it."""
        with self._lock:
            self.journal.take_edits()
            if body.new_name is None:
                return self._record(Action("add", classes=(check_name(body.name),)))
            if body.name not in self.journal.labels.classes:
                raise HTTPException(404, f"unknown class {body.name!r}")
            new_name = check_name(body.new_name) if body.new_name else ""
            return self._record(Action("rename", classes=(body.name,), new_name=new_name))

    def _record(self, action: Action) -> dict[str, Any]:
        self.journal.record(action)
        self._changed.set()
        return self.status()

    def _label_of(self, names: Sequence[str]) -> str | list[str]:
        """Convert classes to the endpoint format: a name or a list of names."""
        return [*names] if self._is_multi else names[0]

    def _text_of(self, row: int) -> dict[str, Any]:
        """Return a row with its texts and its label or null."""
        texts = zip(COLUMNS, self.texts, strict=False)
        names = self.journal.label_of(row)
        label = None if names is None else self._label_of(names)
        return {"row": row + 1, **{name: column[row] for name, column in texts}, "label": label}

    def status(self) -> dict[str, Any]:
        """Return counts, feature progress, and how often the head agrees."""
        with self._lock:
            labels = self.journal.labels
            last = labels.agreements[-LAST_SUGGESTIONS:]
            return {
                "texts": int((~self._is_blank).sum()),
                "labeled": len(labels.rows),
                "skipped": len(labels.skipped),
                "classes": labels.counts(),
                "multi_label": self._is_multi,
                "undoable": len(self.journal.actions),
                "features": 1.0 if self._features is not None else round(self._progress, 3),
                "error": self._error,
                "agreement": self._agreement,
                "suggestions": {"last": len(last), "agreed": sum(last)},
                "file": str(self.journal.table_path),
                "command": self.command(),
            }

    def contradictions(self) -> list[dict[str, Any]]:
        """Return labels that the head contradicts, most doubtful first."""
        with self._lock:
            labels, output = self.journal.labels, self._output
            if output is None:
                return []
            names, count = {*output.task.class_names}, len(output.logits)
            rows = [r for r, of_row in labels.rows.items() if r < count and names >= {*of_row}]
            rows = [row for row in rows if row not in labels.confirmed]
            is_label = mark_labels([labels.rows[row] for row in rows], output.task.class_names)
            probabilities = output.probabilities[rows]
            doubts = np.where(is_label, 1 - probabilities, probabilities).max(axis=1, initial=0)
            doubtful = np.array(rows, int)[np.argsort(-doubts, kind="stable")][:MAX_CONTRADICTIONS]
            predicted = {row: output.predict(row)[0] for row in doubtful.tolist()}
            return [
                {**self._text_of(row), "predicted": self._label_of(names)}
                for row, names in predicted.items()
                if {*names} != {*labels.rows[row]}
            ]

    def search(self, class_name: str | None, words: str, *, skipped: bool) -> list[dict[str, Any]]:
        """Return labeled texts of one or all classes, or skipped texts, that contain the words.

        Newest labels come first.
        """
        with self._lock:
            labels, words = self.journal.labels, words.casefold()
            rows = [*labels.skipped] if skipped else [*reversed(labels.rows)]
            matches = [
                self._text_of(row)
                for row in rows
                if not class_name or class_name in labels.rows.get(row, ())
                if any(words in column[row].casefold() for column in self.texts)
            ]
        return matches[:MAX_LISTED]

    # Background work.

    def _work(self, read_features: ReadFeatures) -> None:
        try:
            with sent_to(self._follow):
                features = normalize(read_features(self.texts))
            # Leave the other cores free to serve the page.
            torch.set_num_threads(1)
            with self._lock:
                self._selection.features = self._features = features
            self._changed.set()
            while self._changed.wait() and not self._is_stopped:
                self._changed.clear()
                self._fit(read_features)
        except Exception as error:  # shown on the page too; labeling continues without a head
            known = explain(error)
            self._error = known.message if known else f"{type(error).__name__}: {error}"
            message = f"no suggestions, texts in random order: {self._error}"
            emit(WarningMessage(message, remedy=known.remedy if known else ""))

    def _follow(self, event: Event) -> None:
        if isinstance(event, Advance):
            self._progress = event.done / event.total

    def _fit(self, read_features: ReadFeatures) -> None:
        with self._lock:
            labels = self.journal.labels
            rows, how, classes = dict(labels.rows), dict(labels.how), list(labels.classes)
        if missing := [name for name in classes if name not in self._name_features]:
            described = [
                (name, text)
                for name in missing
                for text in self._descriptions.get(name, [name_as_text(name)])
            ]
            texts = [text for _, text in described]
            is_class = mark_labels([[name] for name, _ in described], missing)
            with self._reads:
                features = read_features([texts, texts][: len(self.texts)])
            means = mean_by_class(features, is_class)
            self._name_features |= dict(zip(missing, means, strict=True))
        assert self._features is not None
        known = {row: names for row, names in rows.items() if row < len(self._features)}
        fitted = {row: names for row, names in known.items() if how.get(row) != "random"}
        names = {name: self._name_features[name] for name in classes}
        output = fit_output(
            fitted, names, self._features, sample=self._sample, is_multi=self._is_multi
        )
        agreement = measure_agreement(output, {r: known[r] for r in known.keys() - fitted.keys()})
        with self._lock:
            self._output, self._agreement = output, agreement


def fit_output(
    rows: LabeledRows,
    names: Mapping[str, NDArray[np.float32]],
    features: Features,
    *,
    sample: NDArray[np.int64],
    is_multi: bool,
) -> HeadOutput | None:
    """Fit a head on labeled rows, and on the features of class names if they help.

    For few single-label rows, the head consists of prototypes, which also learn from a random
    ``sample`` of the texts. Return None for fewer than two classes.
    """
    classes = [*names]
    if len(classes) < 2 - is_multi:
        return None
    task = Multi(classes) if is_multi else Single(classes)
    is_label, of_rows = mark_labels(rows.values(), classes), features[[*rows]]
    of_names = np.stack([*names.values()])
    if len(rows) < FIRST_TEXTS and not is_multi:
        texts = np.concatenate([of_rows, features[sample[~np.isin(sample, [*rows])]]])
        prototypes = Prototypes.of(of_names, texts, is_label.argmax(axis=1))
        return HeadOutput(task, prototypes.head.logits(features), prototypes.head)
    # Names help if at least half of them are nearest to the mean of their own class. Two
    # classes with labels are needed to tell.
    fits = names_fit(of_names, of_rows, is_label)
    names_help = len(fits) < 2 or fits.mean() >= MIN_FITTING_NAMES
    # Classes without labels are known only by their name.
    by_name = np.flatnonzero(~is_label.any(axis=0) | names_help)
    is_label = np.concatenate([is_label, np.eye(len(classes), dtype=bool)[by_name]])
    labeled = LabeledFeatures(
        np.concatenate([of_rows, of_names[by_name]]),
        is_label.astype(np.float32) if is_multi else is_label.argmax(axis=1),
        np.ones(len(is_label), np.float32),
        task.losses,
        len(classes),
        np.zeros(len(is_label), np.int64),
    )
    head = fit_linear_head(
        labeled, inverse_regularization=DEFAULT_INVERSE_REGULARIZATION, max_gradient=MAX_GRADIENT
    )
    return HeadOutput(task, head.logits(features), head)


def mark_labels(rows: Collection[Sequence[str]], classes: Sequence[str]) -> NDArray[np.bool_]:
    """Return an indicator matrix of the classes of rows: [rows, classes]."""
    marks = [[name in names for name in classes] for names in rows]
    return np.array(marks, bool).reshape(len(rows), len(classes))


def check_name(name: str) -> str:
    """Return a class name as normalized by ``finetune run``."""
    name = name_classes([name])[name]
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise HTTPException(422, f"class names must have 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def measure_agreement(output: HeadOutput | None, drawn: LabeledRows) -> dict[str, Any] | None:
    """Return the main metric of a head on random texts, with its 95% interval."""
    if output is None or not drawn:
        return None
    names: list[Any] = [*drawn.values()]
    if output.task.problem_type != MULTI:
        names = [name for [name] in names]
    task, logits = output.task, output.logits[[*drawn]]
    metric, interval, _ = measure_first(task, logits, task.from_json(names))
    return {"texts": len(drawn), "metric": METRICS[metric].title, **asdict(interval)}


def make_label_app(
    session: LabelingSession, *, name: str, hosts: Collection[str], token: str
) -> ASGIApp:
    """Build the application. ``name`` is the name of the labeled file."""

    async def search(request: Request) -> Response:
        query = request.query_params
        found = session.search(
            query.get("class"), query.get("search", ""), skipped="skipped" in query
        )
        return JSONResponse(found)

    async def show_next(request: Request) -> Response:
        number = request.query_params.get("row", "")
        return JSONResponse(session.next(int(number) if number.isdecimal() else None))

    def mark_words(request: Request) -> Response:  # in a thread, so that other requests don't wait
        number = request.query_params.get("row", "")
        return JSONResponse(session.mark_words(int(number) if number.isdecimal() else 0))

    source = session.journal.source
    is_review = bool(session.journal.suggestions)
    page = {"name": name, "multi_label": source.is_multi_label, "is_review": is_review}
    routes = [
        Route("/api/next", show_next),
        Route("/api/words", mark_words),
        route("/api/label", session.label, LabelBody),
        route("/api/undo", session.undo, UndoBody),
        route("/api/classes", session.change_class, ClassBody),
        route("/api/status", session.status),
        route("/api/contradictions", session.contradictions),
        Route("/api/texts", search),
    ]
    return make_app(routes, name="label", page=page, hosts=hosts, token=token)
