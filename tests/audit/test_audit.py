"""Label errors and near duplicates, computed from features."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pytest

from finetune.audit import audit
from finetune.audit.audit import predict_out_of_fold, rank_suspects
from finetune.audit.duplicates import find_near_duplicates
from finetune.data.dataset import make_dataset
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.single import Single
from finetune.training.linear_head import LabeledFeatures

TASK, ROWS = Single(["a", "b", "c"]), 600
FIRST = "what is the capital of the old kingdom of siam"
OTHERS = [f"who wrote novel {number} about city {number * 7}" for number in range(30)]
COUNTRIES = ["peru", "chad", "oman", "cuba", "mali"]
RANDOM = np.random.default_rng(0).normal(size=(ROWS, 40)).astype(np.float32)


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.1])
def test_swapped_labels_rank_first(fraction: float) -> None:
    true = np.arange(ROWS) % 3
    labels = true.copy()
    chosen = np.random.default_rng(1).permutation(ROWS)[: round(fraction * ROWS)]
    labels[chosen] = (true[chosen] + 1) % 3
    features = np.float32(2.5 * np.eye(3)[true] + RANDOM[:, :3])
    rows = LabeledFeatures(features, labels, np.ones(ROWS, np.float32), TASK.losses, 3, labels)
    logits = predict_out_of_fold(rows, np.arange(ROWS), folds=5)
    order, losses = rank_suspects(TASK, logits, labels)
    assert (np.diff(losses[order]) <= 0).all()
    assert not fraction or np.isin(order[: len(chosen)], chosen).mean() > 0.7


def test_only_row_of_a_class_is_not_a_suspect() -> None:
    order, _ = rank_suspects(TASK, np.zeros((5, 3), np.float32), np.array([0, 0, 1, 1, 2]))
    assert sorted(order.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("task", [Single(["place", "person"]), Multi(["place", "person"])])
def test_suspect_words_support_the_suggested_label(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Any, columns: Any) -> Any:
        return np.float32([["city" in text, "who" in text] for text in columns[0]])

    monkeypatch.setattr(audit, "read_text_features", read)
    texts, is_multi = ["the old city", "who is it"] * 20, isinstance(task, Multi)
    classes = np.arange(40) % 2
    classes[[0, 2]] = 1  # wrong labels
    labels = np.eye(2, dtype=np.float32)[classes] if is_multi else classes
    decoded = [[name] if is_multi else name for name in np.array(task.class_names)[classes]]
    rows = make_dataset(texts, pyarrow.array(decoded), task=task)
    table = audit._Table(rows, task, np.array(["train"] * 40), 40, {})
    weights = np.ones(40, np.float32)
    features = LabeledFeatures(read(None, [texts]), labels, weights, task.losses, 2, classes)
    logits = np.float32(10 * features.features - 5)

    def explain(tokens_of_first: int) -> Any:
        lengths = np.array([tokens_of_first, *[5] * 39])
        inputs = SimpleNamespace(examples={"train": SimpleNamespace(lengths=lengths)})
        return audit._explain_suggestions(table, cast(Any, inputs), features, logits, [0, 1, 2])

    found = explain(5)
    assert [*found] == [0, 2]
    assert [(change.word, change.label) for change in found[0]] == [
        ("city", "place" if is_multi else None)
    ]
    assert [*explain(5_000)] == [2]


@pytest.mark.parametrize(
    ("texts", "pairs"),
    [
        ([FIRST, FIRST.upper(), *OTHERS], {(0, 1)}),
        ([FIRST, "What is the capital of the old kingdom of Siam?!", *OTHERS], {(0, 1)}),
        ([FIRST, "the capital of the old kingdom of siam is what", *OTHERS], {(0, 1)}),
        ([FIRST, "what was the capital of the old kingdom of siam", *OTHERS], {(0, 1)}),
        ([f"what is the capital of {country}" for country in COUNTRIES], set()),
        (["!!!", "???", "!!!"], {(0, 2)}),
        (["Paris", "London", "paris", "berlin"], {(0, 2)}),
    ],
)
def test_texts_that_share_most_words_are_near_duplicates(
    texts: list[str], pairs: set[tuple[int, int]]
) -> None:
    duplicates = find_near_duplicates(pyarrow.array(texts), RANDOM[: len(texts)])
    assert set(zip(duplicates.first.tolist(), duplicates.second.tolist(), strict=True)) == pairs


def test_texts_with_similar_features_are_near_duplicates() -> None:
    features = RANDOM[:40].copy()
    features[7] = features[3] + 0.01
    duplicates = find_near_duplicates(
        pyarrow.array([f"w{number}" for number in range(40)]), features
    )
    assert (duplicates.first.tolist(), duplicates.second.tolist()) == ([3], [7])
    assert len(set(duplicates.groups(40).tolist())) == 39
