import numpy as np
import pytest

from finetune.evaluation.answers import Answer, answer_texts


def test_each_text_gets_its_most_probable_class_and_its_probability() -> None:
    logits = np.array([[0.0, 1.0, -1.0], [100.0, 0.0, 99.0]], np.float32)

    answers = answer_texts(["one", "two"], logits, class_names=["a", "b", "c"])

    shares = np.exp(logits - logits.max(1, keepdims=True))
    expected = shares.max(1) / shares.sum(1)
    assert answers == [
        Answer("one", "b", pytest.approx(expected[0], rel=1e-5)),
        Answer("two", "a", pytest.approx(expected[1], rel=1e-5)),
    ]
