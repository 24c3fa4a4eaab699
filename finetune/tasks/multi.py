"""Any number of labels a text: each class is a yes or a no of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError
from finetune.events import Emit
from finetune.tasks.base import (
    BALANCE_CLASSES,
    Answer,
    Confidences,
    ProblemType,
    Scores,
    Task,
    WeightedMetrics,
    by_class,
    read_class_names,
)
from finetune.tasks.figures import Figure, Table, choose_listed, percent, text_of
from finetune.tasks.intervals import format_interval
from finetune.tasks.labels import (
    distinct_values,
    find_separator,
    listed_counts,
    map_lists,
    map_values,
    name_classes,
    sort_classes,
    split_labels,
)
from finetune.tasks.resampled import macro_f1
from finetune.tasks.temperature import fit_temperature, note_on_calibration, read_temperature

if TYPE_CHECKING:
    import pyarrow
    import torch

DEFAULT_THRESHOLD = 0.5
# What a row of a class may count at most: with one row in 1,000, more would be that row alone.
MAX_POSITIVE_WEIGHT = 100.0
# A threshold chosen by fewer rows than this says more about these than about the class.
MIN_ROWS_OF_THRESHOLD = 5
# Two labels that stand together in so many of the rows that have either are nearly one.
STRONG_OVERLAP = 0.9
RARE_ROWS = 10
# A class of fewer rows has little part in a loss that all rows share alike.
SMALL_SHARE = 0.01


@dataclass(frozen=True)
class LabelScores:
    """The metrics of one class: the first five in 0..1, 0 where undefined; support in rows."""

    threshold: float
    precision: float
    recall: float
    f1: float
    average_precision: float
    support: int


@dataclass(frozen=True)
class MultiScores(Scores):
    """The metrics where each row has any number of classes; all but the loss are in 0..1.

    Args:
        samples: Rows of the split.
        loss: Mean binary cross-entropy of all classes.
        micro_f1: F1 of all answers together, whichever class they are about.
        macro_f1: Mean F1 over the classes that are predicted or true.
        subset_accuracy: Share of the rows whose classes are all right, and no other is predicted.
        mean_average_precision: Mean over the classes that have rows; it depends on no threshold.
        baseline_micro_f1: Micro F1 of always answering with the largest class.
        per_class: By class name.
    """

    micro_f1: float
    macro_f1: float
    subset_accuracy: float
    mean_average_precision: float
    baseline_micro_f1: float
    per_class: Mapping[str, LabelScores]

    @property
    def figures(self) -> Sequence[Figure]:
        """Micro and macro F1, subset accuracy, mean average precision."""
        note = f"{self.samples} rows; always the largest class: {percent(self.baseline_micro_f1)}"
        exact = f"95% interval {format_interval(self.subset_accuracy, self.samples)}"
        precision = self.mean_average_precision
        return (
            Figure("micro_f1", "micro F1", "f1", self.micro_f1, note),
            Figure("macro_f1", "macro F1", "f1", self.macro_f1),
            Figure("subset_accuracy", "subset accuracy", "accuracy", self.subset_accuracy, exact),
            Figure("mean_average_precision", "mean average precision", "map", precision),
        )

    @property
    def table(self) -> Table:
        """The metrics of each class, and from which probability on a text has it."""
        rows = [
            (name, f"{one.threshold:.2f}", percent(one.precision), percent(one.recall),
             percent(one.f1), percent(one.average_precision), str(one.support))
            for name, one in self.per_class.items()
        ]  # fmt: skip
        columns = ("class", "threshold", "precision", "recall", "F1", "average precision", "rows")
        return Table("Classes of the test split", columns, rows)

    @property
    def warning(self) -> str:
        """Says that always answering with the largest class is as good."""
        if self.micro_f1 > self.baseline_micro_f1:
            return ""
        return (
            f"micro F1 {self.micro_f1:.1%} is not better than always answering with the largest "
            f"class, {self.baseline_micro_f1:.1%}"
        )


@dataclass(frozen=True)
class MultiAnswer(Answer):
    """The classes of a text.

    Args:
        labels: Names of the classes whose probability reaches their threshold; maybe none.
        probabilities: Of all classes by name, where they were asked for.
    """

    labels: Sequence[str]
    probabilities: Mapping[str, float] | None = None

    @property
    def result(self) -> dict[str, Any]:
        """The labels, and maybe the probabilities of all classes."""
        result: dict[str, Any] = {"labels": list(self.labels)}
        return result if self.probabilities is None else {
            **result, "probabilities": self.probabilities
        }  # fmt: skip


@dataclass(frozen=True)
class Multi(Task):
    """Any number of classes a text; the labels are float32 of shape [rows, classes], 0 or 1.

    Args:
        class_names: The classes in the order of their numbers.
        positive_weights: What a row that has a class counts in the loss, for each class, where
            one that has it not counts 1; none for 1.
        thresholds: From which probability on a text has each class; none for one half. They are
            chosen on the validation split, and stand in ``task_specific_params`` of config.json.
    """

    name: ClassVar[str] = "multi"
    problem_type: ClassVar[ProblemType] = "multi_label_classification"
    metric_names: ClassVar[Sequence[str]] = (
        *("micro_f1", "macro_f1", "subset_accuracy", "mean_average_precision", "loss"),
    )
    scores_type: ClassVar[type[Scores]] = MultiScores

    thresholds: Sequence[float] = ()
    positive_weights: tuple[float, ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """The thresholds by class, and the temperature."""
        thresholds = dict(zip(self.class_names, self._thresholds, strict=True))
        return {"thresholds": thresholds, **super().parameters}

    @property
    def _thresholds(self) -> Sequence[float]:
        return self.thresholds or [DEFAULT_THRESHOLD] * len(self.class_names)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> "Multi":
        """Return the task of a model's ``config.json``."""
        names = read_class_names(config)
        thresholds = [parameters["thresholds"][name] for name in names]
        return cls(names, thresholds, temperature=read_temperature(parameters))

    @classmethod
    def parse(cls, columns: Sequence["pyarrow.ChunkedArray"]) -> "list[pyarrow.ChunkedArray]":
        """Return the names of each row's classes, as lists; an empty text is none.

        Raises:
            DataError: If the lists say of each class, by 0 or 1, whether a row has it.
        """
        import pyarrow

        distinct = distinct_values(columns)
        separator = find_separator(distinct)
        lists = {label: split_labels(label, separator) for label in distinct}
        classes = name_classes(name for own in lists.values() for name in own)
        repeats = any(len(own) > len({*own}) for own in lists.values())
        if {*classes.values()} <= {"0", "1"} and repeats:
            raise DataError(
                "the labels are lists of 0 and 1, with a place for each class",
                remedy="write lists of the names of a row's classes, or a column for each class",
            )

        def name(label: str) -> list[str]:
            return [*dict.fromkeys(filter(None, map(classes.get, lists[label])))]

        kind = pyarrow.list_(pyarrow.string())
        return [map_values(column, name, kind=kind) for column in columns]

    @classmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Multi":
        """Return the task whose classes are those that occur, unless they have names."""
        import pyarrow.compute as pc

        return cls(names or sort_classes(pc.list_flatten(labels).unique().to_pylist()))

    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return lists of the numbers of classes."""
        numbers = self.class_numbers
        return map_lists(labels, lambda flat: map_values(flat, numbers.get, kind="int64"))

    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return lists of the names of classes."""
        return map_lists(column, lambda flat: map_values(flat, self.class_names.__getitem__))

    @property
    def feature(self) -> Any:
        """A list of ``ClassLabel``."""
        from datasets import ClassLabel, List

        return List(ClassLabel(names=list(self.class_names)))

    def labels(self, column: "pyarrow.ChunkedArray") -> NDArray[np.float32]:
        """Return 1 where a row has a class."""
        import pyarrow.compute as pc

        lengths = pc.list_value_length(column).to_numpy()
        labels = np.zeros((len(column), len(self.class_names)), np.float32)
        labels[np.repeat(np.arange(len(column)), lengths), pc.list_flatten(column).to_numpy()] = 1
        return labels

    def format_label(self, label: Any) -> str:
        """Return the names of a row's classes."""
        return ", ".join(self._names_where(label > 0)) or "none"

    def _names_where(self, mask: NDArray[np.bool_]) -> list[str]:
        return [self.class_names[number] for number in np.flatnonzero(mask).tolist()]

    @property
    def label_kinds(self) -> str:
        """How many classes there are."""
        return f"any number of {len(self.class_names)} classes each"

    def find_unknown(
        self, labels: "pyarrow.ChunkedArray", *, training: "pyarrow.ChunkedArray"
    ) -> "pyarrow.ChunkedArray":
        """Return the classes that no training row has, by name."""
        import pyarrow
        import pyarrow.compute as pc

        known = pc.list_flatten(training).unique()
        rows = labels.combine_chunks()
        is_unknown = pc.invert(pc.is_in(rows.flatten(), value_set=known))
        counts = np.bincount(
            pc.list_parent_indices(rows).filter(is_unknown).to_numpy(), minlength=len(rows)
        )
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(counts)]), "int32")
        lists = pyarrow.ListArray.from_arrays(offsets, rows.flatten().filter(is_unknown))
        joined = pc.if_else(pyarrow.array(counts > 0), pc.binary_join(lists, ", "), None)
        return pyarrow.chunked_array([joined])

    def strata(self, labels: NDArray[np.float32]) -> NDArray[np.int64]:
        """Each class gives its share of the rows of which it is the rarest class."""
        order = np.argsort(labels.sum(axis=0), kind="stable")
        rarest: NDArray[np.int64] = labels[:, order].argmax(axis=1)
        return np.where(labels.any(axis=1), order[rarest], len(order))

    def count_classes(self, labels: NDArray[np.float32]) -> dict[str, int]:
        """Return the rows of each class."""
        counts = labels.sum(axis=0, dtype=np.int64)
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    def first_rows(self, labels: NDArray[np.float32]) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        firsts = zip(self.class_names, labels.argmax(axis=0).tolist(), strict=True)
        return {name: row for (name, row), rows in zip(firsts, labels.T, strict=True) if rows.any()}

    def describe(self, labels: NDArray[np.float32]) -> dict[str, float]:
        """Return how many classes rows have."""
        of_rows = labels.sum(axis=1)
        return {
            "classes of a row, mean": float(of_rows.mean()),
            "classes of a row, at most": float(of_rows.max()),
            "rows without a class": float(np.count_nonzero(of_rows == 0)),
        }

    def find_oddities(self, labels: NDArray[np.float32]) -> Iterator[tuple[str, str]]:
        """Yield odd names, classes of all or of few rows, and those that stand together."""
        yield from super().find_oddities(labels)
        counts = self.count_classes(labels)
        if of_all := [name for name, rows in counts.items() if rows == len(labels)]:
            found = f"classes that every training row has: {', '.join(of_all)}"
            yield found, "leave them out: nothing can be learned of them"
        few = {
            name: rows
            for name, rows in counts.items()
            if RARE_ROWS <= rows < SMALL_SHARE * len(labels)
        }
        if few:
            found = f"classes of fewer than {SMALL_SHARE:.0%} of the training rows"
            yield f"{found}: {listed_counts(few)}", BALANCE_CLASSES
        together = labels.T @ labels
        rows = together.diagonal()
        either = rows[:, None] + rows - together
        are_one = np.triu((either >= RARE_ROWS) & (together >= STRONG_OVERLAP * either), k=1)
        for first, second in np.argwhere(are_one).tolist():
            names = f"{self.class_names[first]!r} and {self.class_names[second]!r}"
            share = together[first, second] / either[first, second]
            found = f"{names} stand together in {share:.0%} of the rows that have either"
            yield found, "join them if they mean the same"

    def fitted(self, labels: NDArray[np.float32], *, is_balanced: bool) -> "Multi":
        """Return the task whose rows with a class count as much as those without, if balanced."""
        if not is_balanced:
            return self
        rows = labels.sum(axis=0, dtype=np.float64)
        weights = np.clip((len(labels) - rows) / np.maximum(rows, 1), None, MAX_POSITIVE_WEIGHT)
        return replace(self, positive_weights=tuple(weights.tolist()))

    def sample_labels(self, count: int) -> NDArray[np.float32]:
        """Return a class for each example."""
        classes = len(self.class_names)
        return np.eye(classes, dtype=np.float32)[super().sample_labels(count)]

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the mean binary cross-entropy of the classes of each example, as they weigh."""
        given = self.positive_weights
        weights = _on_device(given, logits.device) if given else None
        return binary_cross_entropy(logits, labels, positive_weights=weights)

    def tuned(
        self,
        validate: Callable[[], tuple[NDArray[np.float32], NDArray[np.float32]]],
        *,
        calibrates: bool,
        emit: Emit,
    ) -> "Multi":
        """Return the task with the thresholds that give the highest F1 on validation rows.

        The temperature is that of the lowest binary cross-entropy of all classes.
        """
        logits, labels = validate()
        columns = zip(_probabilities(logits).T, labels.T > 0, strict=True)
        tuned = replace(self, thresholds=[find_threshold(*column) for column in columns])
        if not calibrates:
            return tuned
        wrong = int(np.count_nonzero((logits > 0) != (labels > 0)))
        temperature = fit_temperature(
            binary_cross_entropy, logits, labels, wrong_answers=wrong, emit=emit
        )
        return replace(tuned, temperature=temperature)

    def fold(self, parameters: "Sequence[torch.nn.Parameter]") -> "Multi":
        """Divide the last layer by the temperature; the thresholds stay at the same logits."""
        if self.temperature == 1:
            return self
        from scipy.special import expit, logit

        super().fold(parameters)
        moved = expit(logit(np.array(self._thresholds)) / self.temperature)
        return replace(self, thresholds=moved.tolist())

    def score(self, logits: NDArray[np.float32], labels: NDArray[np.float32]) -> MultiScores:
        """Compare the classes whose probability reaches their threshold with the true ones."""
        import torch

        from finetune.tasks.metric import compute_metrics

        metrics = compute_metrics(
            self._compute, predictions=_probabilities(logits), references=labels
        )
        loss = binary_cross_entropy(torch.tensor(logits), torch.tensor(labels)).mean()
        return MultiScores(samples=len(labels), loss=loss.item(), **metrics)

    def _compute(
        self, probabilities: NDArray[np.float32], references: NDArray[np.float32]
    ) -> dict[str, Any]:
        from sklearn.metrics import average_precision_score, precision_recall_fscore_support

        predicted, true = self._are_predicted(probabilities), np.asarray(references > 0)
        counts = true.sum(axis=0)
        columns = precision_recall_fscore_support(true, predicted, average=None, zero_division=0)
        precisions = [
            float(average_precision_score(own, scores)) if own.any() else 0.0
            for own, scores in zip(true.T, probabilities.T, strict=True)
        ]
        rows = zip(
            self._thresholds, *(one.tolist() for one in columns[:3]), precisions, counts.tolist(),
            strict=True,
        )  # fmt: skip
        per_class = dict(zip(self.class_names, (LabelScores(*row) for row in rows), strict=True))
        occurs = (true | predicted).any(axis=0)
        largest = int(counts.max(initial=0))
        return {
            "micro_f1": _f1((true & predicted).sum(), predicted.sum(), counts.sum()),
            "macro_f1": float(columns[2][occurs].mean()) if occurs.any() else 0.0,
            "subset_accuracy": float((true == predicted).all(axis=1).mean()),
            "mean_average_precision": (
                float(np.mean(precisions, where=counts > 0)) if counts.any() else 0.0
            ),
            "baseline_micro_f1": _f1(largest, len(true), counts.sum()),
            "per_class": per_class,
        }

    def _are_predicted(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = probabilities >= np.array(self._thresholds, np.float32)
        return mask

    def answers(
        self, texts: Sequence[str], logits: NDArray[np.float32], *, all_scores: bool = False
    ) -> list[MultiAnswer]:
        """Return each text's classes, maybe with the probabilities of all."""
        probabilities = _probabilities(logits)
        scores = by_class(self.class_names, probabilities, is_wanted=all_scores)
        found = zip(texts, self._are_predicted(probabilities), scores, strict=True)
        return [MultiAnswer(text, self._names_where(mask), own) for text, mask, own in found]

    def confidences(self, logits: NDArray[np.float32], labels: NDArray[np.float32]) -> Confidences:
        """Return the probability that a row has a class, for each row and class."""
        classes = np.tile(np.arange(labels.shape[1]), len(labels))
        probabilities = _probabilities(logits).astype(np.float64)
        return Confidences(classes, probabilities.ravel(), labels.ravel() > 0)

    def predictions(
        self, logits: NDArray[np.float32], labels: NDArray[np.float32]
    ) -> Iterator[dict[str, Any]]:
        """Yield true and predicted classes."""
        predicted = self._are_predicted(_probabilities(logits))
        for true, own in zip(labels > 0, predicted, strict=True):
            yield {"label": self._names_where(true), "predicted": self._names_where(own)}

    def row_errors(self, predictions: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return how many classes each row has too many or too few."""
        return np.array([len({*row["label"]} ^ {*row["predicted"]}) for row in predictions], float)

    def weighted_metrics(self, predictions: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return what computes the metrics of the predicted classes: all but average precision."""
        true, predicted = (
            self._matrix([row[column] for row in predictions]) for column in ("label", "predicted")
        )
        is_right = (true == predicted).all(axis=1)

        def compute(weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
            right, answers = weights @ (true * predicted), weights @ (true + predicted)
            return {
                "micro_f1": 2 * right.sum(axis=1) / np.maximum(answers.sum(axis=1), 1),
                "macro_f1": macro_f1(right, answers),
                "subset_accuracy": weights @ is_right / weights.sum(axis=1),
            }

        return compute

    def _matrix(self, names_of_rows: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        """Return 1 where a row has a class: [rows, classes]."""
        numbers = self.class_numbers
        matrix = np.zeros((len(names_of_rows), len(numbers)))
        rows = np.repeat(np.arange(len(names_of_rows)), [*map(len, names_of_rows)])
        matrix[rows, [numbers[name] for names in names_of_rows for name in names]] = 1
        return matrix

    @property
    def limits(self) -> Sequence[str]:
        """Sentences on what its answers do not say."""
        return (
            "A text has a class from the threshold above on, which was chosen on the validation "
            "split and stands in `config.json`. With `top_k=None` the pipeline gives the "
            "probability of each class; it applies no thresholds.",
            note_on_calibration(self.temperature),
        )

    def mistakes(self, predictions: Sequence[Mapping[str, Any]]) -> Table:
        """Return the rows with the most wrong classes."""
        differing = (({*row["label"]} ^ {*row["predicted"]}, row) for row in predictions)
        wrong = [(classes, row) for classes, row in differing if classes]
        note = f"{len(wrong)} of {len(predictions)} test rows have a class too many or too few."
        wrong.sort(key=lambda one: len(one[0]), reverse=True)
        numbers = self.class_numbers
        groups = [
            {f"class-{numbers[one]}": f"{one} missed, or predicted wrongly" for one in classes}
            for classes, _ in wrong
        ]
        listed = choose_listed(groups)
        rows = [
            (text_of(row), ", ".join(row["label"]), ", ".join(row["predicted"]), str(len(classes)))
            for classes, row in map(wrong.__getitem__, listed)
        ]
        columns = ("text", "true", "predicted", "wrong classes")
        shown = [groups[number] for number in listed]
        return Table("Most wrong classes", columns, rows, text_columns=3, note=note, groups=shown)


def binary_cross_entropy(
    logits: "torch.Tensor",
    labels: "torch.Tensor",
    *,
    positive_weights: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Return the mean binary cross-entropy of the classes of each example: of shape [examples]."""
    import torch

    entropy = torch.nn.functional.binary_cross_entropy_with_logits
    return entropy(logits, labels, reduction="none", pos_weight=positive_weights).mean(dim=1)


@cache
def _on_device(numbers: tuple[float, ...], device: "torch.device") -> "torch.Tensor":
    """Return numbers as a tensor, made once: a step that is captured can't copy to a device."""
    import torch

    return torch.tensor(numbers, device=device)


def find_threshold(probabilities: NDArray[np.float32], true: NDArray[np.bool_]) -> float:
    """Return the probability from which on a class is predicted at the highest F1: in 0..1.

    It lies half way between two probabilities that occur. With too few rows it is one half.

    >>> find_threshold(np.linspace(0, 1, 11), np.arange(11) > 5)
    0.55
    """
    if true.sum() < MIN_ROWS_OF_THRESHOLD or true.all():
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order].astype(np.float64)
    right = np.cumsum(true[order])
    f1 = 2 * right / (np.arange(1, len(true) + 1) + true.sum())
    is_cut = np.append(ranked[1:] < ranked[:-1], True)  # equal ones can't be told apart
    best = int(np.where(is_cut, f1, -1.0).argmax())
    below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float((ranked[best] + below) / 2)


def _probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    import torch

    probabilities: NDArray[np.float32] = torch.from_numpy(logits).sigmoid().numpy()
    return probabilities


def _f1(right: int, predicted: int, true: int) -> float:
    return float(2 * right / max(predicted + true, 1))
