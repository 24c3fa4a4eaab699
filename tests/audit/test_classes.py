"""Classes to merge, the learning curve, and what to label next."""

import numpy as np
import pytest

from finetune.audit.classes import find_merges
from finetune.audit.curve import choose_to_label, measure_curve
from finetune.tasks.single import Single
from finetune.training.linear_head import LabelledFeatures


def merges(names: list[str], taken_for: dict[int, int]) -> list[tuple[str, str, str]]:
    """Return merges where rows of some classes are predicted as another one."""
    rows = np.repeat(np.arange(len(names)), np.where(np.arange(len(names)) == 1, 3, 20))
    probabilities = np.full((len(rows), len(names)), 0.01, np.float32)
    probabilities[np.arange(len(rows)), [taken_for.get(row, row) for row in rows.tolist()]] = 0.9
    return [(one.label, one.into, one.by) for one in find_merges(names, probabilities, rows)]


@pytest.mark.parametrize("other", ["Billing ", "BILLING", "billing-", "bílling"])
def test_names_that_differ_in_case_or_marks_alone_are_one(other: str) -> None:
    assert merges(["billing", other, "refund"], {}) == [(other, "billing", "name")]


@pytest.mark.parametrize("other", ["biling", "bililng", "billings", "bolling"])
def test_misspelt_names_are_one_if_their_rows_are_alike(other: str) -> None:
    assert merges(["billing", other, "refund"], {1: 0}) == [(other, "billing", "name")]
    assert merges(["billing", other, "refund"], {}) == []


def test_names_with_other_numbers_are_not_alike() -> None:
    assert merges(["level 1", "level 2", "refund"], {1: 0}) == []


def test_classes_that_are_taken_for_each_other_are_named() -> None:
    names, rows = ["a", "b", "c"], np.repeat([0, 1, 2], 40)
    probabilities = np.tile(np.float32([0.5, 0.4, 0.1]), (120, 1))
    probabilities[::2] = [0.4, 0.5, 0.1]
    probabilities[80:] = [0.0, 0.1, 0.9]
    [found] = find_merges(names, probabilities, rows)
    assert ({found.label, found.into}, found.by) == ({"a", "b"}, "model")


def test_the_curve_forecasts_what_more_rows_give() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(1200) % 2
    features = generator.normal(size=(1200, 40)).astype(np.float32)
    features[:, 0] += 1.5 * labels
    task = Single(["a", "b"])
    rows = LabelledFeatures(features, labels, np.ones(1200, np.float32), task.losses, 2, labels)
    half = measure_curve(task, rows.select(np.arange(600)), np.arange(600))
    whole = measure_curve(task, rows, np.arange(1200))
    assert half is not None
    assert whole is not None
    assert half.forecast[0].low <= whole.points[-1].value <= half.forecast[0].high
    assert [one.rows for one in half.points] == sorted(one.rows for one in half.points)
    assert measure_curve(task, rows.select(np.arange(20)), np.arange(20)) is None


def test_unsure_texts_are_labelled_first_and_not_twice() -> None:
    features = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    probabilities = np.tile(np.float32([0.99, 0.01]), (100, 1))
    probabilities[40:50] = 0.5
    chosen = choose_to_label(features, probabilities, batch=5, batches=2).tolist()
    assert sorted(chosen) == list(range(40, 50))
