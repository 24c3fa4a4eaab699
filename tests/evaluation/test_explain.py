"""Explanations of a model that counts words."""

from collections.abc import Sequence

import numpy as np
import pytest

from finetune.evaluation.explain import MAX_PIECES, MAX_WORDS, explain
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

WEIGHTS = {"invoice": (3.0, 0.0), "pay": (1.0, 0.0), "password": (0.0, 3.0), "支": (2.0, 0.0)}


class CountingModel:
    """Adds the weights of the distinct words in a text, and collects the texts that it gets."""

    def __init__(self, outputs: int = 2) -> None:
        self.outputs, self.texts = outputs, list[str]()

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> np.ndarray:
        self.texts += texts
        joined = (
            texts if pairs is None else [" ".join(both) for both in zip(texts, pairs, strict=True)]
        )
        logits = [
            sum((np.array(weight) for word, weight in WEIGHTS.items() if word in text.lower()),
                np.array([0.1, -0.1]))
            for text in joined
        ]  # fmt: skip
        return np.array(logits, np.float32)[:, : self.outputs]


SINGLE = Single(["billing", "login"])


def explain_text(text: str, task: Task = SINGLE, pair: str | None = None) -> list[str]:
    model = CountingModel(len(task.output_names))
    texts, pairs = [text], None if pair is None else [pair]
    [explanation] = explain(task, model, model(texts, pairs), texts, pairs)
    return [str(change) for change in explanation]


def test_change_is_the_probability_difference_without_the_word() -> None:
    model, texts = CountingModel(), ["Please pay the invoice"]
    [explanation] = explain(SINGLE, model, model(texts), texts)
    first = explanation[0]
    assert first.word == "invoice"
    probabilities = SINGLE.read_logits(model(["Please pay the invoice", "Please pay the"]))
    before, after = probabilities.probabilities[:, 0]  # type: ignore[index]
    assert first.change == pytest.approx(after - before, abs=1e-6)
    assert [change.word for change in explanation][:2] == ["invoice", "pay"]


def test_words_that_support_a_different_class_come_last() -> None:
    assert explain_text("invoice password pay")[-1].startswith("password +")


def test_identical_words_are_removed_together() -> None:
    model, texts = CountingModel(), ["Invoice: the invoice, the INVOICE"]
    [explanation] = explain(SINGLE, model, model(texts), texts)
    assert [change.word for change in explanation] == ["Invoice", "the"]
    assert model.texts[1].lower().count("invoice") == 0


def test_characters_of_unspaced_scripts_are_words() -> None:
    assert explain_text("我要支付")[0].startswith("支 -")


@pytest.mark.parametrize("text", ["", "   ", "?!"])
def test_text_without_words_has_an_empty_explanation(text: str) -> None:
    assert explain_text(text) == []


@pytest.mark.parametrize("text", ["invoice", "🙂", "🙂 🙂 😡"])
def test_single_word_or_emoji_is_explained(text: str) -> None:
    assert explain_text(text)


def test_multi_label_texts_are_explained_per_class() -> None:
    task = Multi(["billing", "login"])
    changes = explain_text("invoice and password", task)
    assert changes[0].startswith("billing: invoice -")
    assert any(change.startswith("login: password -") for change in changes)
    assert explain_text("nothing at all", Multi(["a", "b"], thresholds=[0.9, 0.9])) == []


def test_regression_changes_are_in_units_of_the_value() -> None:
    assert explain_text("pay the invoice", Regression())[0] == "invoice -3"


def test_both_texts_of_a_pair_are_explained() -> None:
    model, pair = CountingModel(), (["pay it"], ["the invoice"])
    [explanation] = explain(SINGLE, model, model(*pair), *pair)
    assert [(change.word, change.column) for change in explanation][:2] == [
        ("invoice", "text_pair"),
        ("pay", "text"),
    ]


@pytest.mark.parametrize("end", [". ", " "], ids=["sentences", "one sentence"])
def test_strongest_word_of_a_long_text_is_found_with_few_predictions(end: str) -> None:
    filler = [f"word{number}a word{number}b word{number}c word{number}d" for number in range(5_000)]
    filler[3_210] += " invoice"
    model, texts = CountingModel(), [end.join(filler)]
    [explanation] = explain(SINGLE, model, model(texts), texts)
    assert explanation[0].word == "invoice"
    assert len(model.texts) <= 1 + 4 * MAX_PIECES + MAX_WORDS
