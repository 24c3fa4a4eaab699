"""Texts that count as the same."""

from finetune.data.repeats import normal_form, rows_by_text


def test_case_and_spaces_make_no_other_text() -> None:
    assert normal_form(" What  is\nTHE Straße? ") == normal_form("what is the strasse?")
    assert normal_form("What is it?") != normal_form("What is it")


def test_rows_are_grouped_by_text_in_their_order() -> None:
    texts = ["One", "two", "ONE ", "three", "one"]
    assert rows_by_text(texts) == {"one": [0, 2, 4], "two": [1], "three": [3]}
