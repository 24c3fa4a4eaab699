"""Texts that count as the same."""

import pyarrow

from finetune.data.repeats import normal_form, number_texts


def test_case_and_spaces_make_no_other_text() -> None:
    assert normal_form(" What  is\nTHE Straße? ") == normal_form("what is the strasse?")
    assert normal_form("What is it?") != normal_form("What is it")


def test_texts_are_numbered_in_order_of_appearance() -> None:
    texts = pyarrow.chunked_array([["One", "two", "ONE "], ["three", "one"]])
    assert number_texts(texts).tolist() == [0, 1, 0, 2, 0]
