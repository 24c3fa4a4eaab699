"""The columns of texts and labels, set or guessed."""

from typing import Any

import pyarrow
import pytest

from finetune.config.schema import DataConfig
from finetune.data import columns as columns_module
from finetune.data.columns import Columns, choose_columns, read_texts
from finetune.errors import DataNotFoundError, UsageError

TEXTS = ["The film was long.", "A joy to watch!", "Never again.", "Fine for children."]
MOODS = ["bad", "good", "bad", "good"]
IDS = ["1", "2", "3", "4"]


def choose(*names: str, columns: list[list[str]], **options: str | None) -> tuple[str, str]:
    text, label = names_in(choice(*names, columns=columns, **options))
    return text, label


def choice(*names: str, columns: list[list[str]], **options: str | None) -> Columns:
    """Choose among columns; the options are text, text_pair and label."""
    values = pyarrow.table(dict(zip(names, columns, strict=True)))
    named: dict[str, Any] = {f"{option}_column": name for option, name in options.items()}
    return choose_columns(values, DataConfig("films.csv", **named), table="films.csv")


def names_in(chosen: Columns) -> tuple[str, ...]:
    options = ("text_column", "text_pair_column", "label_column")
    return tuple(chosen[one].name for one in options if one in chosen)


def test_the_only_column_of_a_file_to_predict_has_the_texts() -> None:
    for texts in (["yes", "no", "yes", "no"] * 3, ["https://a.example/1", "https://a.example/2"]):
        table, options = pyarrow.table({"said": texts}), DataConfig("films.csv")
        found = choose_columns(table, options, table="films.csv", wanted=("text_column",))
        assert names_in(found) == ("said",)


def test_numbers_are_labels_where_nothing_else_is_or_a_number_is_asked_for() -> None:
    prices = ["12.31", "7.90", "120.05", "14.00"]
    assert choose("said", "price", columns=[TEXTS, prices]) == ("said", "price")
    with pytest.raises(DataNotFoundError, match="looks like labels"):
        choose("said", "nr", columns=[TEXTS, IDS])
    table = pyarrow.table({"said": TEXTS, "mood": MOODS, "price": prices})
    options = DataConfig("films.csv", task="regression")
    assert names_in(choose_columns(table, options, table="films.csv")) == ("said", "price")


def test_of_a_large_table_rows_from_all_over_it_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MAX_BYTES", 5_000)
    texts = [f"{row} films were long" for row in range(400)]
    moods = ["bad"] * 200 + ["good"] * 200
    chosen = choice("a", "b", columns=[texts, moods])
    assert (chosen["text_column"].name, chosen["label_column"].name) == ("a", "b")
    assert "2 different values" in chosen["label_column"].reason


def test_columns_that_are_named_are_taken_and_the_other_one_is_guessed() -> None:
    columns = [TEXTS, [text[:9] for text in TEXTS], MOODS, MOODS]
    names = ("text", "headline", "label", "mood")
    assert choose(*names, columns=columns, text="headline", label="mood") == ("headline", "mood")
    assert choose(*names, columns=columns, text="headline") == ("headline", "label")
    assert choose(*names, columns=columns, label="mood") == ("text", "mood")


@pytest.mark.parametrize(
    ("names", "columns", "words"),
    [(["number", "said"], [IDS, TEXTS], "--label-column"), (["said"], [TEXTS], "for labels")],
)
def test_no_column_to_guess_lists_those_there_are(
    names: list[str], columns: list[list[str]], words: str
) -> None:
    with pytest.raises(DataNotFoundError, match=r"films\.csv") as raised:
        choose(*names, columns=columns)
    assert words in raised.value.remedy
    assert "'said'" in raised.value.remedy


def test_an_unknown_column_gets_a_guess_and_a_list() -> None:
    with pytest.raises(DataNotFoundError, match="'Sentiments'") as raised:
        choose("text", "sentiment", columns=[TEXTS, MOODS], label="Sentiments")
    assert "did you mean 'sentiment'?" in raised.value.remedy
    assert "'text'" in raised.value.remedy
    with pytest.raises(DataNotFoundError) as raised:
        choose("text", "sentiment", columns=[TEXTS, MOODS], text="xyz")
    assert "did you mean" not in raised.value.remedy


def test_a_second_text_is_named_and_the_first_guessed_or_named() -> None:
    names, columns = ("says", "of", "label"), [TEXTS, [*TEXTS[1:], TEXTS[0]], MOODS]
    for text in (None, "says"):
        found = choice(*names, columns=columns, text_pair="of", text=text)
        assert names_in(found) == names
    with pytest.raises(UsageError, match="--text-pair-column and --label-column are both 'label'"):
        choice(*names, columns=columns, text_pair="label", label="label")
    with pytest.raises(DataNotFoundError, match="no column 'off'") as raised:
        choice(*names, columns=columns, text_pair="off")
    assert "did you mean 'of'" in raised.value.remedy


def test_columns_are_named_by_their_number_and_several_are_joined() -> None:
    names, columns = ("title", "review", "mood"), [TEXTS, TEXTS[::-1], MOODS]
    found = choice(*names, columns=columns, text="title,review", label="3")
    assert (found["text_column"].name, found["label_column"].name) == ("title,review", "mood")
    numbered = choice(*names, columns=columns, text="2, 1")
    assert (numbered["text_column"].name, numbered["label_column"].name) == ("review,title", "mood")
    with pytest.raises(DataNotFoundError, match="no column 'reviews'"):
        choice(*names, columns=columns, text="title,reviews")
    table = pyarrow.table({"a": ["x", "", "y"], "b": ["1", "2", ""], "a,b": ["p", "q", "r"]})
    assert read_texts(table, ["a", "b"]).to_pylist() == ["x\n1", "2", "y"]
    assert read_texts(table, ["a,b"]).to_pylist() == ["p", "q", "r"]


def test_what_is_open_names_the_options_to_choose_from() -> None:
    texts = [f"The film number {row} was long." for row in range(60)]
    columns = [texts, [f"Again, {text}" for text in texts], [MOODS[row % 4] for row in range(60)]]
    with pytest.raises(UsageError, match="which column is the text: 'query', 'document'") as raised:
        choose("query", "document", "label", columns=columns)
    assert "to be joined: --text-column query,document" in raised.value.remedy
    assert "--text-column query --text-pair-column document" in raised.value.remedy
    codes = [[["food", "team"][row % 2] for row in range(60)], ["team"] + [""] * 59]
    with pytest.raises(UsageError, match="label: 'code1', 'code2'") as raised:
        choose("said", "code1", "code2", columns=[texts, *codes])
    assert "several with a class or a mark in each: --label-column code1,code2" in (
        raised.value.remedy
    )
    marks = [[str(row % count // (count - 1)) for row in range(60)] for count in (2, 3, 4)]
    for names in (("is_reply", "verified", "has_link"), ("has_link", "verified", "is_reply")):
        listed = [name for name in names if name != "has_link"]  # a link is rarely a label
        with pytest.raises(UsageError) as raised:
            choose("said", *names, columns=[texts, *marks])
        expected = "can't tell which column is the label: " + ", ".join(map(repr, listed))
        assert raised.value.message == expected
        several = f"or several with a class or a mark in each: --label-column {','.join(listed)}"
        assert raised.value.remedy == f"choose one with --label-column, {several}"
