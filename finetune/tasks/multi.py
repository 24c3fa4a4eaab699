"""Any number of labels a text: each class is a yes or a no of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError
from finetune.events import Emit
from finetune.tasks.base import (
    BALANCE_CLASSES,
    Logits,
    Outputs,
    Task,
    read_class_names,
    score_classes,
)
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
from finetune.tasks.metrics import MULTI, ProblemType, average_precisions, count_classes
from finetune.tasks.scores import ClassScores
from finetune.tasks.tables import Table, list_mistakes, text_of
from finetune.tasks.temperature import describe_calibration, fit_temperature, read_temperature

if TYPE_CHECKING:
    import pyarrow
    import torch

Indicators = NDArray[np.float32]
DEFAULT_THRESHOLD = 0.5
# A row of a class weighs at most so much: with one row in 1,000, only that row would count.
MAX_POSITIVE_WEIGHT = 100.0
# A threshold chosen on fewer rows says more about these than about the class.
MIN_ROWS_OF_THRESHOLD = 5
# Two labels that are together in so many of the rows that have either are nearly one.
STRONG_OVERLAP = 0.9
# Classes of fewer rows are reported as rare by the data check anyway.
RARE_ROWS = 10
# A class with a smaller fraction of the rows has little weight in the loss.
SMALL_FRACTION = 0.01


@dataclass(frozen=True)
class Multi(Task):
    """Any number of classes a text; the labels are float32 of shape [rows, classes], 0 or 1.

    Args:
        class_names: The classes in the order of their numbers.
        thresholds: The probability from which on a text has each class; none for one half. They
            are chosen on the validation split and saved in config.json.
        positive_weights: The weight of rows that have a class, for each class, relative to rows
            that have it not; none for 1.
    """

    name: ClassVar[str] = "multi"
    problem_type: ClassVar[ProblemType] = MULTI
    result_name: ClassVar[str] = "labels"

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

        arrow_type = pyarrow.list_(pyarrow.string())
        return [map_values(column, name, arrow_type=arrow_type) for column in columns]

    @classmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Multi":
        """Return the task whose classes are those that occur, unless they are named."""
        import pyarrow.compute as pc

        return cls(names or sort_classes(pc.list_flatten(labels).unique().to_pylist()))

    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return lists of class numbers."""
        numbers = self.class_numbers
        return map_lists(labels, lambda flat: map_values(flat, numbers.get, arrow_type="int64"))

    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return lists of class names."""
        return map_lists(column, lambda flat: map_values(flat, self.class_names.__getitem__))

    @property
    def feature(self) -> Any:
        """A list of ``ClassLabel``."""
        from datasets import ClassLabel, List

        return List(ClassLabel(names=list(self.class_names)))

    def labels(self, column: "pyarrow.ChunkedArray") -> Indicators:
        """Return 1 where a row has a class."""
        import pyarrow.compute as pc

        lengths = pc.list_value_length(column).to_numpy()
        return self._indicators(lengths, pc.list_flatten(column).to_numpy())

    def _indicators(self, lengths: NDArray[Any], numbers: NDArray[Any]) -> Indicators:
        """Return 1 where a row has a class, from the classes of each row in a row."""
        labels = np.zeros((len(lengths), len(self.class_names)), np.float32)
        labels[np.repeat(np.arange(len(lengths)), lengths), numbers] = 1
        return labels

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

    def to_json(self, labels: NDArray[Any]) -> list[list[str]]:
        """Return the names of each row's classes."""
        names = [self.class_names[number] for number in np.nonzero(labels)[1].tolist()]
        ends = np.cumsum(np.count_nonzero(labels, axis=1)).tolist()
        return [names[start:end] for start, end in pairwise([0, *ends])]

    def from_json(self, values: Sequence[Any]) -> Indicators:
        """Return 1 where a row has a class."""
        numbers = self.class_numbers
        found = np.array([numbers[name] for names in values for name in names], np.int64)
        return self._indicators(np.array([*map(len, values)]), found)

    def format_label(self, label: Any) -> str:
        """Return the names of a row's classes."""
        return ", ".join(self.to_json(label[None])[0]) or "none"

    def strata(self, labels: Indicators) -> NDArray[np.int64]:
        """Return the rarest class of each row: a split takes its fraction of each."""
        order = np.argsort(labels.sum(axis=0), kind="stable")
        rarest: NDArray[np.int64] = labels[:, order].argmax(axis=1)
        return np.where(labels.any(axis=1), order[rarest], len(order))

    def count_classes(self, labels: Indicators) -> dict[str, int]:
        """Return the rows of each class."""
        counts = labels.sum(axis=0, dtype=np.int64)
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    def first_rows(self, labels: Indicators) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        firsts = zip(self.class_names, labels.argmax(axis=0).tolist(), labels.T, strict=True)
        return {name: row for name, row, has_class in firsts if has_class.any()}

    def describe(self, labels: Indicators) -> dict[str, float]:
        """Return how many classes rows have."""
        counts = labels.sum(axis=1)
        return {
            "classes of a row, mean": float(counts.mean()),
            "classes of a row, at most": float(counts.max()),
            "rows without a class": float(np.count_nonzero(counts == 0)),
        }

    def find_oddities(self, labels: Indicators) -> Iterator[tuple[str, str]]:
        """Yield odd names, classes of all or of few rows, and those that are always together."""
        yield from super().find_oddities(labels)
        counts = self.count_classes(labels)
        if of_all := [name for name, rows in counts.items() if rows == len(labels)]:
            found = f"classes that every training row has: {', '.join(of_all)}"
            yield found, "leave them out: there is nothing to learn from them"
        few = {
            name: rows
            for name, rows in counts.items()
            if RARE_ROWS <= rows < SMALL_FRACTION * len(labels)
        }
        if few:
            found = f"classes of fewer than {SMALL_FRACTION:.0%} of the training rows"
            yield f"{found}: {listed_counts(few)}", BALANCE_CLASSES
        together = labels.T @ labels
        rows = together.diagonal()
        either = rows[:, None] + rows - together
        are_one = np.triu((either >= RARE_ROWS) & (together >= STRONG_OVERLAP * either), k=1)
        for first, second in np.argwhere(are_one).tolist():
            names = f"{self.class_names[first]!r} and {self.class_names[second]!r}"
            fraction = together[first, second] / either[first, second]
            yield (
                f"{names} are together in {fraction:.0%} of the rows that have either",
                "join them if they mean the same",
            )

    def with_training_labels(self, labels: Indicators, *, is_balanced: bool) -> "Multi":
        """Return the task whose rows with a class weigh as much as those without, if balanced."""
        if not is_balanced:
            return self
        rows = labels.sum(axis=0, dtype=np.float64)
        weights = np.clip((len(labels) - rows) / np.maximum(rows, 1), None, MAX_POSITIVE_WEIGHT)
        return replace(self, positive_weights=tuple(weights.tolist()))

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the mean binary cross-entropy of the classes of each example, weighted."""
        import torch

        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        own = self.positive_weights
        weights = _on_device(own, logits.device) if own else None
        return entropy(logits, labels, reduction="none", pos_weight=weights).mean(dim=1)

    def sample_labels(self, count: int) -> Indicators:
        """Return a class for each example."""
        return np.eye(len(self.class_names), dtype=np.float32)[super().sample_labels(count)]

    def calibrate(
        self,
        predict: Callable[[], tuple[Logits, Indicators]],
        *,
        fits_temperature: bool,
        emit: Emit,
    ) -> "Multi":
        """Return the task with the thresholds of the highest F1 on validation rows.

        The temperature is that of the lowest binary cross-entropy of all classes.
        """
        logits, labels = predict()
        columns = zip(_probabilities(logits).T, labels.T > 0, strict=True)
        calibrated = replace(self, thresholds=[find_threshold(*column) for column in columns])
        if not fits_temperature:
            return calibrated
        mistakes = int(np.count_nonzero((logits > 0) != (labels > 0)))
        temperature = fit_temperature(
            self._unweighted.losses, logits, labels, mistakes=mistakes, emit=emit
        )
        return replace(calibrated, temperature=temperature)

    def scale_output_layer(self, parameters: "Sequence[torch.nn.Parameter]") -> "Multi":
        """Divide the output layer by the temperature; the thresholds stay at the same logits."""
        if self.temperature == 1:
            return self
        from scipy.special import expit, logit

        super().scale_output_layer(parameters)
        moved = expit(logit(np.array(self._thresholds)) / self.temperature)
        return replace(self, thresholds=moved.tolist())

    @property
    def _unweighted(self) -> "Multi":
        return replace(self, positive_weights=())

    def evaluation_losses(self, logits: Logits, labels: Indicators) -> NDArray[np.float32]:
        """Return the loss of each row without class weights."""
        return super(Multi, self._unweighted).evaluation_losses(logits, labels)

    def read_logits(self, logits: Logits) -> Outputs:
        """Return the classes whose probability reaches their threshold."""
        probabilities = _probabilities(logits)
        return Outputs(probabilities >= np.array(self._thresholds, np.float32), probabilities)

    def baseline_predictions(self, labels: Indicators) -> NDArray[np.bool_]:
        """Return the largest class."""
        is_largest = np.arange(labels.shape[1]) == labels.sum(axis=0).argmax()
        return np.broadcast_to(is_largest, labels.shape)

    def score_classes(self, labels: Indicators, outputs: Outputs) -> dict[str, ClassScores]:
        """Return the metrics of each class."""
        weights, probabilities = np.ones((1, len(labels))), outputs.probabilities
        assert probabilities is not None
        return score_classes(
            self.class_names,
            count_classes(labels, outputs.predicted, weights),
            threshold=self._thresholds,
            average_precision=average_precisions(labels, probabilities, weights)[0],
        )

    def confidences(
        self, logits: Logits, labels: Indicators
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the probability of each row and class, and whether the row has it."""
        return _probabilities(logits).astype(np.float64).ravel(), labels.ravel() > 0

    @property
    def label_summary(self) -> str:
        """How many classes there are."""
        return f"any number of {len(self.class_names)} classes each"

    @property
    def limits(self) -> Sequence[str]:
        """Sentences on what its predictions do not say."""
        return (
            "A text has a class from the threshold above on, which was chosen on the validation "
            "split and is in `config.json`. With `top_k=None` the pipeline gives the probability "
            "of each class; it applies no thresholds.",
            describe_calibration(self.temperature),
        )

    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return the rows with the most wrong classes."""
        numbers = self.class_numbers
        wrong = [({*row["label"]} ^ {*row["predicted"]}, row) for row in rows]
        wrong = sorted((one for one in wrong if one[0]), key=lambda one: -len(one[0]))
        return list_mistakes(
            "Most wrong classes",
            ("text", "true", "predicted", "wrong classes"),
            [
                (
                    text_of(row),
                    ", ".join(row["label"]),
                    ", ".join(row["predicted"]),
                    str(len(own)),
                )
                for own, row in wrong
            ],
            groups=[
                {f"class-{numbers[one]}": f"mistakes with {one}" for one in own} for own, _ in wrong
            ],
            note=f"{len(wrong)} of {len(rows)} test rows have a class too many or too few.",
        )


@cache
def _on_device(numbers: tuple[float, ...], device: "torch.device") -> "torch.Tensor":
    """Return numbers as a tensor, made once: a captured step can't copy to a device."""
    import torch

    return torch.tensor(numbers, device=device)


def find_threshold(probabilities: NDArray[np.float32], true: NDArray[np.bool_]) -> float:
    """Return the threshold of a class with the highest F1, in 0..1; one half with too few rows.

    It lies half way between two probabilities that occur.

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


def _probabilities(logits: Logits) -> NDArray[np.float32]:
    import torch

    probabilities: NDArray[np.float32] = torch.from_numpy(logits).sigmoid().numpy()
    return probabilities
