"""The columns of texts and classes, named or guessed."""

import pyarrow
import pytest

from finetune.data.columns import Columns, choose_columns
from finetune.errors import DataError, DataNotFound, DataUnreadable, UsageError

TEXTS = ["The film was long.", "A joy to watch!", "Never again.", "Fine for children."]
MOODS = ["bad", "good", "bad", "good"]
IDS = ["1", "2", "3", "4"]


def choose(
    *names: str, columns: list[list[str]], text: str | None = None, label: str | None = None
) -> Columns:
    values = pyarrow.table(dict(zip(names, columns, strict=True)))
    return choose_columns(values, text=text, label=label, table="films.csv")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("text", "label"),
        ("Sentence", "Class"),
        ("review", "sentiment"),
        ("question", "coarse_label"),
        ("QUESTION", "label-coarse"),
        ("content", "y"),
        ("title", "topic"),
    ],
)
def test_names_that_say_what_a_column_holds_decide(text: str, label: str) -> None:
    for order in ((0, 1, 2), (2, 1, 0)):
        names = [("id", text, label)[place] for place in order]
        columns = [(IDS, TEXTS, MOODS)[place] for place in order]
        assert choose(*names, columns=columns) == (text, label)


def test_text_and_label_go_before_other_names() -> None:
    names = ("title", "text", "topic", "label")
    assert choose(*names, columns=[TEXTS, TEXTS, MOODS, MOODS]) == ("text", "label")


def test_without_such_names_few_values_are_the_label_and_the_longest_texts_the_text() -> None:
    names = ("id", "author", "said", "mood")
    authors = ["Ada", "Bea", "Cleo", "Dan"]
    assert choose(*names, columns=[IDS, authors, TEXTS, MOODS]) == ("said", "mood")


def test_numbers_may_be_classes_and_are_never_texts() -> None:
    numbers = ["1000000000000000000000", "2000000000000000000000", "3", "4"]
    columns = [numbers, TEXTS, ["0", "1", "0", "1"]]
    assert choose("serial", "said", "mood", columns=columns) == ("said", "mood")


def test_a_label_of_many_classes_is_guessed_where_each_recurs() -> None:
    classes = [f"class {number % 50}" for number in range(400)]
    texts = [f"This is the text of row {number}, which is long." for number in range(400)]
    assert choose("said", "kind", columns=[texts, classes]) == ("said", "kind")


def test_columns_that_are_named_are_taken_and_the_other_one_is_guessed() -> None:
    columns = [TEXTS, TEXTS, MOODS, MOODS]
    names = ("text", "headline", "label", "mood")
    assert choose(*names, columns=columns, text="headline", label="mood") == ("headline", "mood")
    assert choose(*names, columns=columns, text="headline") == ("headline", "label")
    assert choose(*names, columns=columns, label="mood") == ("text", "mood")


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("title", "review", "label"), "--text-column"),
        (("premise", "hypothesis", "label"), "--text-column"),
        (("Text", "text", "label"), "--text-column"),
    ],
)
def test_several_columns_that_may_hold_the_texts_ask_for_the_option(
    names: tuple[str, ...], option: str
) -> None:
    with pytest.raises(DataError, match=names[1]) as raised:
        choose(*names, columns=[TEXTS, TEXTS, MOODS])
    assert option in raised.value.remedy


@pytest.mark.parametrize("names", [("text", "topic", "class"), ("text", "mood", "seen")])
def test_several_columns_that_may_hold_the_classes_ask_for_the_option(
    names: tuple[str, ...],
) -> None:
    with pytest.raises(DataError, match=names[1]) as raised:
        choose(*names, columns=[TEXTS, MOODS, MOODS])
    assert "--label-column" in raised.value.remedy


@pytest.mark.parametrize(
    ("columns", "option"),
    [([IDS, TEXTS], "--label-column"), ([IDS, MOODS], "--text-column"), ([TEXTS], "--label")],
)
def test_no_column_to_guess_lists_those_there_are(columns: list[list[str]], option: str) -> None:
    names = ("number", "said")[-len(columns) :]
    with pytest.raises(DataNotFound, match=r"films\.csv") as raised:
        choose(*names, columns=columns)
    assert option in raised.value.remedy
    assert "'said'" in raised.value.remedy


def test_an_unknown_column_gets_a_guess_and_a_list() -> None:
    with pytest.raises(DataNotFound, match="'Sentiments'") as raised:
        choose("text", "sentiment", columns=[TEXTS, MOODS], label="Sentiments")
    assert "did you mean 'sentiment'?" in raised.value.remedy
    assert "'text'" in raised.value.remedy
    with pytest.raises(DataNotFound) as raised:
        choose("text", "sentiment", columns=[TEXTS, MOODS], text="xyz")
    assert "did you mean" not in raised.value.remedy


def test_one_column_for_both_is_refused() -> None:
    with pytest.raises(UsageError, match="'text'"):
        choose("text", "label", columns=[TEXTS, MOODS], text="text", label="text")


@pytest.mark.parametrize("first", [("It was dull.", "bad"), ("It was dull.", "0"), ("0", "1")])
def test_a_row_in_place_of_the_header_is_refused(first: tuple[str, str]) -> None:
    with pytest.raises(DataUnreadable, match="no header row") as raised:
        choose(*first, columns=[TEXTS, MOODS])
    assert "text,label" in raised.value.remedy


def test_numbers_as_names_are_taken_where_they_are_named() -> None:
    assert choose("0", "1", columns=[TEXTS, MOODS], text="0", label="1") == ("0", "1")
