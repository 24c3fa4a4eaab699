"""Compares orders in which to label texts, on TREC in memory.

    python comparisons/label_draws.py train_5500.label --model minilm

The orders are that of ``finetune label``, the same with k-means++ for the first texts, and a random
one. Each draws from 2,000 other questions. A linear head on the frozen encoder is fitted on the
first labels, and tested on 1,500 questions. If a class has no label, its questions are
misclassified. ``--classes`` chooses the names of the classes: words; codes such as HUM; none, so
that each class is added with its first text, as a word; or the 50 fine classes, such as human desc.
"""

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from few_labels import HELD_OUT, POOL, WORDS, read_questions
from scipy import stats
from sklearn.metrics import f1_score

from finetune.commands.flags import load
from finetune.tasks.single import Single
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    LabeledFeatures,
    fit_linear_head,
    normalize,
)
from finetune.web.journal import Action, Labels, TextEncoder
from finetune.web.labeling import FIRST_TEXTS, Selection, fit_output

ORDERS = ("label", "k-means++", "random")


def draw_spread(features: Any, rows: Any) -> list[int]:
    """Return rows that are as different as possible, drawn as k-means++ draws its centers."""
    generator, distances, chosen = np.random.default_rng(0), np.ones(len(rows)), list[int]()
    while len(chosen) < FIRST_TEXTS:
        chosen.append(int(generator.choice(len(rows), p=distances / distances.sum())))
        similarities = features[rows] @ features[rows[chosen[-1]]]
        distances = np.minimum(distances, np.maximum(1 - similarities, 0))
        distances[chosen] = 0
    return [int(row) for row in rows[chosen]]


def label_texts(
    order: str, true: Sequence[str], features: Any, names: Mapping[str, Any], *, adds: bool,
    count: int, seed: int,
) -> tuple[list[int], list[bool]]:  # fmt: skip
    """Return rows in an order, and whether the suggestion for each was right.

    With ``adds``, a class is added when its first text is labeled.
    """
    rows = np.random.default_rng(seed).permutation(len(true))
    selection = Selection(rows, random_fraction=0.0 if order == "random" else 0.25)
    selection.features, labels, right = features, Labels(), list[bool]()
    drawn = rows.tolist() if order == "random" else []
    if order == "k-means++":
        drawn = draw_spread(features, rows[~np.isin(rows, selection.random_rows)])
    labels.add_classes([] if adds else names)
    for number in range(count):
        known = {name: names[name] for name in labels.classes}
        fitted = {row: name for row, name in labels.rows.items() if labels.how[row] != "random"}
        output = fit_output(fitted, known, features, sample=rows, is_multi=False)
        chosen = selection.next(labels, output)
        assert chosen is not None
        row, how = chosen
        if number < len(drawn):
            row, how = drawn[number], "spread"
        right.append(output is not None and output.predict(row)[0] == (true[row],))
        labels.apply(Action("label", row, (true[row],), how))
    return [*labels.rows], right


def score_head(features: Any, labels: Sequence[str], rows: Sequence[int]) -> float:
    """Return macro F1 in percent, on the first questions, of a linear head fitted on some rows."""
    task = Single(sorted({labels[row] for row in rows}))
    fitted = LabeledFeatures(
        features[rows], np.array([task.class_numbers[labels[row]] for row in rows]),
        np.ones(len(rows), np.float32), task.losses, len(task.class_names),
        np.zeros(len(rows), np.int64),
    )  # fmt: skip
    head = fit_linear_head(fitted, inverse_regularization=DEFAULT_INVERSE_REGULARIZATION)
    best = head.logits(features[:HELD_OUT]).argmax(axis=1)
    tested = labels[:HELD_OUT]
    predicted = [task.class_names[number] for number in best]
    return 100 * float(f1_score(tested, predicted, labels=sorted({*tested}), average="macro"))


def main() -> None:
    """Print the mean of each figure, and the paired gain of the first order with its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--labels", type=int, nargs="+", default=[12, 20, 60, 120])
    parser.add_argument("--classes", nargs="+", default=["words", "codes", "none", "fine"])
    options = parser.parse_args()
    encoder = TextEncoder(load(model=options.model, device=options.device).config)
    questions = read_questions(options.file, is_fine=True)
    features = normalize(encoder([[text for text, _ in questions]]))
    for kind in options.classes:
        labels = [label if kind == "fine" else label.partition(":")[0] for _, label in questions]
        classes = sorted({*labels})
        parts = [name.split(":") for name in classes]
        texts = classes if kind == "codes" else [" ".join([WORDS[p[0]], *p[1:]]) for p in parts]
        names = dict(zip(classes, normalize(encoder([texts])), strict=True))
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for number, order in product(range(options.orders), ORDERS):
            pool = random.Random(number).sample(range(HELD_OUT, len(labels)), POOL)
            rows, right = label_texts(
                order, [labels[row] for row in pool], features[pool], names, adds=kind == "none",
                count=max(options.labels), seed=number,
            )  # fmt: skip
            for count in options.labels:
                score = score_head(features, labels, [pool[row] for row in rows[:count]])
                figures[f"macro F1, {count} labels"][order].append(score)
            figures["right suggestions of 60"][order].append(100 * statistics.mean(right[:60]))
        for figure, values in figures.items():
            cells = [f"{kind}, {figure}: {statistics.mean(values[ORDERS[0]]):.1f}"]
            for order in ORDERS[1:]:
                gains = np.subtract(values[ORDERS[0]], values[order])
                margin = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
                mean = statistics.mean(values[order])
                cells.append(f"{order} {mean:.1f} ({gains.mean():+.1f} ± {margin:.1f})")
            print("; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
