"""Texts that count as the same."""

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.repeats import normal_form, number_texts


def test_case_and_spaces_make_no_other_text() -> None:
    assert normal_form(" What  is\nTHE Straße? ") == normal_form("what is the strasse?")
    assert normal_form("What is it?") != normal_form("What is it")


def test_texts_are_numbered_in_order_of_appearance() -> None:
    texts = pyarrow.chunked_array([["One", "two", "ONE "], ["three", "one"]])
    assert number_texts(texts).tolist() == [0, 1, 0, 2, 0]


def test_pairs_share_a_number_where_both_texts_are_the_same() -> None:
    texts = pyarrow.chunked_array([["a", "b", "A "], ["a", "b", "a"]])
    pairs = pyarrow.chunked_array([["x", "x", "X", "y"], ["x", "x"]])
    assert number_texts(texts, pairs).tolist() == [0, 1, 0, 2, 1, 0]


@given(st.lists(st.text(st.sampled_from("aAbB ßẞsS\u03c2\u03a3\tİ\u2003"), max_size=4), min_size=1))
def test_texts_share_a_number_if_their_normal_forms_are_the_same(texts: list[str]) -> None:
    numbers = number_texts(pyarrow.chunked_array([texts])).tolist()
    forms = [normal_form(text) for text in texts]
    assert numbers == [list(dict.fromkeys(forms)).index(form) for form in forms]
