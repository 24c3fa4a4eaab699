"""Texts that count as the same."""

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.dataset import number_texts


def test_texts_are_numbered_in_order_of_appearance() -> None:
    texts = [["One", "two", " ONE\n"], ["three", "one", "one?"], ["die  STRASSE", "Die Straße"]]
    assert number_texts(pyarrow.chunked_array(texts)).tolist() == [0, 1, 0, 2, 0, 3, 4, 4]


def test_pairs_share_a_number_where_both_texts_are_the_same() -> None:
    texts = pyarrow.chunked_array([["a", "b", "A "], ["a", "b", "a"]])
    pairs = pyarrow.chunked_array([["x", "x", "X", "y"], ["x", "x"]])
    assert number_texts(texts, pairs).tolist() == [0, 1, 0, 2, 1, 0]


@given(st.lists(st.text(st.sampled_from("aAbB ßẞsS\u03c2\u03a3\tİ\u2003"), max_size=4), min_size=1))
def test_texts_share_a_number_if_their_normal_forms_are_the_same(texts: list[str]) -> None:
    numbers = number_texts(pyarrow.chunked_array([texts])).tolist()
    forms = [" ".join(text.casefold().split()) for text in texts]
    assert numbers == [list(dict.fromkeys(forms)).index(form) for form in forms]
