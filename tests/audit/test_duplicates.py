"""Rows that say the same, and rows unlike the rest."""

import numpy as np
import pyarrow
import pytest

from finetune.audit.duplicates import find_near_duplicates
from finetune.audit.outliers import find_outliers

FIRST = "what is the capital of the old kingdom of siam"
OTHERS = [f"who wrote novel {number} about city {number * 7}" for number in range(30)]


def pairs_of(*texts: str) -> set[tuple[int, int]]:
    found = find_near_duplicates(pyarrow.array(texts), None)
    return set(zip(found.first.tolist(), found.second.tolist(), strict=True))


@pytest.mark.parametrize(
    "second",
    [
        FIRST.upper(),
        "What is the capital of the old kingdom of Siam?!",
        "the capital of the old kingdom of siam is what",
        "what was the capital of the old kingdom of siam",
    ],
)
def test_case_punctuation_order_and_a_word_do_not_matter(second: str) -> None:
    assert pairs_of(FIRST, second, *OTHERS) == {(0, 1)}


def test_a_template_with_another_rare_word_is_another_text() -> None:
    countries = ["peru", "chad", "oman", "cuba", "mali"]
    assert pairs_of(*(f"what is the capital of {one}" for one in countries)) == set()


def test_texts_that_mean_the_same_are_found_by_their_features() -> None:
    features = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    features[7] = features[3] + 0.01
    texts = pyarrow.array([f"w{number}" for number in range(40)])
    found = find_near_duplicates(texts, features)
    assert (found.first.tolist(), found.second.tolist()) == ([3], [7])
    assert len(set(found.groups(40).tolist())) == 39


def test_texts_without_words_are_compared_as_they_are() -> None:
    assert pairs_of("!!!", "???", "!!!") == {(0, 2)}


def test_markup_and_other_scripts_are_named() -> None:
    texts = [*(OTHERS * 4), "<div class='x'>buy now</div>", "как дела сегодня"]
    features = np.random.default_rng(0).normal(size=(len(texts), 8)).astype(np.float32)
    rows, _, reasons = find_outliers(pyarrow.array(texts), features)
    found = dict(zip(rows.tolist(), reasons, strict=True))
    assert found[120] == "HTML or other markup"
    assert found[121] == "letters of another script"
