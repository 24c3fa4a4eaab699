import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.evaluation.metrics import compute_metrics

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


def test_figures_of_a_small_example_are_those_by_hand() -> None:
    metrics = compute_metrics(
        predictions=np.array([0, 1, 1, 2]), references=np.array([0, 1, 2, 2]), class_names=NAMES
    )

    assert metrics == {
        "accuracy": 0.75,
        # HUM occurs nowhere, so that the mean is over three classes.
        "macro_f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3),
        "per_class": {
            "ABBR": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1},
            "DESC": {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1},
            "ENTY": {"precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "support": 2},
            "HUM": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
        },
        "confusion_matrix": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]],
    }


def test_class_that_is_only_predicted_counts_in_macro_f1() -> None:
    metrics = compute_metrics(
        predictions=np.array([0, 1]), references=np.array([0, 0]), class_names=NAMES
    )

    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)


@given(rows=ROWS)
def test_figures_agree_with_the_confusion_matrix(rows: list[tuple[int, int]]) -> None:
    predictions, references = np.array(rows).T

    metrics = compute_metrics(predictions=predictions, references=references, class_names=NAMES)

    matrix = np.array(metrics["confusion_matrix"])
    assert matrix.sum() == len(rows)
    assert metrics["accuracy"] == pytest.approx(matrix.trace() / len(rows))
    occurring = [matrix[i].sum() + matrix[:, i].sum() > 0 for i in range(len(NAMES))]
    f1 = np.array([metrics["per_class"][name]["f1"] for name in NAMES])
    assert metrics["macro_f1"] == pytest.approx(f1[occurring].mean())
    for name, row, column in zip(NAMES, matrix, matrix.T, strict=True):
        figure = metrics["per_class"][name]
        right = row[NAMES.index(name)]
        assert figure["support"] == row.sum()
        assert figure["recall"] == pytest.approx(right / max(row.sum(), 1))
        assert figure["precision"] == pytest.approx(right / max(column.sum(), 1))


def test_no_rows_and_unequal_rows_are_refused() -> None:
    none, one, two = (np.zeros(rows, dtype=np.int64) for rows in range(3))

    with pytest.raises(ValueError, match="no rows"):
        compute_metrics(predictions=none, references=none, class_names=NAMES)
    with pytest.raises(ValueError, match="Mismatch"):
        compute_metrics(predictions=one, references=two, class_names=NAMES)


def test_metrics_need_neither_network_nor_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"called with {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    cache = Path(os.environ["HF_HOME"])
    before = sorted(cache.rglob("*"))

    compute_metrics(predictions=np.array([0]), references=np.array([0]), class_names=NAMES)

    assert sorted(cache.rglob("*")) == before


def test_random_numbers_of_others_are_not_disturbed() -> None:
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)

    compute_metrics(predictions=np.array([0]), references=np.array([0]), class_names=NAMES)

    assert np.random.random() == expected
