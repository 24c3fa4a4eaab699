"""Text and label columns, from options or guessed. Ambiguous tables raise an error.

Each line of layouts.txt lists column names and kinds, and the text, second text and label columns.
"""

import hashlib
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from finetune.config.schema import DataConfig
from finetune.data.columns import OPTIONS, Columns, choose_columns, join_texts
from finetune.errors import DataError, DataNotFoundError, UsageError

TEXTS = ["The film was long.", "A joy to watch!", "Never again.", "Fine for children."]
MOODS = ["bad", "good", "bad", "good"]
IDS = ["1", "2", "3", "4"]


def choice(*names: str, columns: list[list[str]], **options: str | None) -> Columns:
    """Choose the columns of a table. The options are text, text_pair and label."""
    values = pyarrow.table(dict(zip(names, columns, strict=True)))
    named: dict[str, Any] = {f"{option}_column": name for option, name in options.items()}
    return choose_columns(values, DataConfig("films.csv", **named), table="films.csv")


def names_in(chosen: Columns) -> tuple[str, ...]:
    options = ("text_column", "text_pair_column", "label_column")
    return tuple(chosen[one].name for one in options if one in chosen)


def test_only_column_of_a_prediction_file_is_the_text() -> None:
    for texts in (["yes", "no", "yes", "no"] * 3, ["https://a.example/1", "https://a.example/2"]):
        table, options = pyarrow.table({"said": texts}), DataConfig("films.csv")
        found = choose_columns(table, options, table="films.csv", wanted=("text_column",))
        assert names_in(found) == ("said",)


def test_text_pair_column_is_set_and_text_column_set_or_guessed() -> None:
    names, columns = ("says", "of", "label"), [TEXTS, [*TEXTS[1:], TEXTS[0]], MOODS]
    for text in (None, "says"):
        found = choice(*names, columns=columns, text_pair="of", text=text)
        assert names_in(found) == names
    with pytest.raises(UsageError, match="--text-pair-column and --label-column are both 'label'"):
        choice(*names, columns=columns, text_pair="label", label="label")
    with pytest.raises(DataNotFoundError, match="no column 'off'") as raised:
        choice(*names, columns=columns, text_pair="off")
    assert "did you mean 'of'" in raised.value.remedy


def test_columns_can_be_selected_by_number_and_joined() -> None:
    names, columns = ("title", "review", "mood"), [TEXTS, TEXTS[::-1], MOODS]
    found = choice(*names, columns=columns, text="title,review", label="3")
    assert (found["text_column"].name, found["label_column"].name) == ("title,review", "mood")
    numbered = choice(*names, columns=columns, text="2, 1")
    assert (numbered["text_column"].name, numbered["label_column"].name) == ("review,title", "mood")
    with pytest.raises(DataNotFoundError, match="no column 'reviews'"):
        choice(*names, columns=columns, text="title,reviews")
    table = pyarrow.table({"a": ["x", "", "y"], "b": ["1", "2", ""], "a,b": ["p", "q", "r"]})
    assert join_texts(table, ["a", "b"]).to_pylist() == ["x\n1", "2", "y"]
    assert join_texts(table, ["a,b"]).to_pylist() == ["p", "q", "r"]


def test_ambiguous_columns_raise_error_listing_options() -> None:
    texts = [f"The film number {row} was long." for row in range(60)]
    columns = [texts, [f"Again, {text}" for text in texts], [MOODS[row % 4] for row in range(60)]]
    with pytest.raises(UsageError, match="which column is the text: 'query', 'document'") as raised:
        choice("query", "document", "label", columns=columns)
    assert "that belong together: --text-column query,document" in raised.value.remedy
    assert "--text-column query --text-pair-column document" in raised.value.remedy
    codes = [[["food", "team"][row % 2] for row in range(60)], ["team"] + [""] * 59]
    with pytest.raises(UsageError, match="label: 'code1', 'code2'") as raised:
        choice("said", "code1", "code2", columns=[texts, *codes])
    assert "several with a class or a mark in each: --label-column code1,code2" in (
        raised.value.remedy
    )
    marks = [[str(row % count // (count - 1)) for row in range(60)] for count in (2, 3, 4)]
    for names in (("is_reply", "verified", "has_link"), ("has_link", "verified", "is_reply")):
        listed = [name for name in names if name != "has_link"]  # a link is rarely a label
        with pytest.raises(UsageError) as raised:
            choice("said", *names, columns=[texts, *marks])
        expected = "can't tell which column is the label: " + ", ".join(map(repr, listed))
        assert raised.value.message == expected
        several = f"or several with a class or a mark in each: --label-column {','.join(listed)}"
        assert raised.value.remedy == f"choose one with --label-column, {several}"


LAYOUTS = Path(__file__).with_name("layouts.txt").read_text(encoding="utf-8").splitlines()
LAYOUT_ROWS = 120
RANDOM = random.Random(1)
WORDS = (
    *("the", "a", "film", "was", "long", "river", "city", "good", "bad", "never"),
    *("again", "people", "said", "about", "market", "price", "team", "player", "court", "new"),
    *("old", "when", "where", "year", "great", "small", "house", "music"),
)


def words(least: int, most: int) -> str:
    return " ".join(RANDOM.choice(WORDS) for _ in range(RANDOM.randint(least, most)))


def one_of(*values: str) -> Callable[[int], str]:
    return lambda row: values[row * 7 % len(values)]


KINDS: dict[str, Callable[[int], str]] = {
    "text": lambda _: words(8, 30),
    "short": lambda _: words(2, 6),
    "title": lambda _: words(5, 9),
    "body": lambda _: words(60, 150),
    "note": lambda row: "" if row % 8 else words(5, 12),
    "name": lambda _: f"{RANDOM.choice(['Ann', 'Bob'])} {RANDOM.choice(['Smith', 'Jones'])}",
    "user": lambda _: words(1, 1) + words(1, 1),
    "userd": lambda row: f"{words(1, 1)}_{row}",
    "handle": lambda _: "@" + words(1, 1) + words(1, 1),
    "tok": lambda _: words(1, 1),
    "rep": lambda row: f"Premise {row // 3} is about {WORDS[row // 3 % len(WORDS)]} and more.",
    "id": lambda row: str(1000 + row),
    "uuid": lambda row: str(uuid.UUID(int=row * 3**70)),
    "md5": lambda row: hashlib.md5(str(row).encode()).hexdigest(),
    "md5w": lambda _: "".join(RANDOM.choice("abcdef") for _ in range(32)),
    "url": lambda row: f"https://x.example/{row}/{words(4, 4).replace(' ', '-')}",
    "path": lambda row: f"data/img/{row}.png",
    "email": lambda row: f"{words(1, 1)}{row}@mail.example",
    "date": lambda row: f"2021-0{1 + row % 9}-1{row % 10}",
    "ts": lambda row: f"2021-0{1 + row % 9}-1{row % 10} 10:{row % 60:02}:00",
    "rfc": lambda row: f"Mon Nov {1 + row % 28:02} 10:{row % 60:02}:00 +0000 2020",
    "cat2": lambda row: "spam" if row % 5 else "ham",
    "cat3": one_of("neg", "neu", "pos"),
    "cat5": one_of("World", "Sports", "Business", "Tech", "Art"),
    "cat20": lambda row: f"{WORDS[row % 20]} desk",
    "country": one_of("US", "DE", "FR", "IN"),
    "city": one_of("New York", "Berlin", "Paris", "Delhi", "Rome", "Oslo"),
    "yn": lambda row: "YES" if row % 3 else "NO",
    "yesno": lambda _: RANDOM.choice(["yes", "no"]),
    "tf": lambda row: str(row % 3 > 0),
    "01": lambda row: str(row % 2),
    "r01": lambda row: str(int(row % 9 == 0)),
    "o01": lambda row: str(int(row % 4 != 0)),
    "star": lambda row: str(1 + row * 3 % 5),
    "age": lambda row: str(18 + row * 7 % 60),
    "count": lambda row: str(row * row % 37),
    "float": lambda row: f"{row * 37 % 100 / 100:.2f}",
    "split": lambda row: "train" if row % 4 else "test",
    "lang": lambda _: "en",
    "empty": lambda _: "",
    "mostempty": lambda row: "" if row % 10 else "x",
    "bio": lambda _: RANDOM.choice(["O", "O", "O", "B-PER", "I-PER"]),
    "pos": one_of("NN", "VB", "DT"),
    "emoji": one_of("😀", "😢"),
    "list": lambda row: '["a", "b"]' if row % 2 else '["a"]',
    "numbers": lambda row: ("0,15", "3", "15,3", "0")[row % 4],
    "arrays": lambda row: ("[0, 15]", "[3]", "[]", "[0]")[row % 4],
    "bars": lambda row: ("joy|fear", "joy", "fear", "fear|anger")[row % 4],
    "first": lambda row: str(int(row % 3 == 0)),
    "second": lambda row: str(int(row % 3 == 1)),
    "third": lambda row: str(int(row % 3 == 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_published_layouts_are_guessed_or_rejected(layout: str) -> None:
    described, _, expected = layout.partition(" = ")
    RANDOM.seed(1)
    kinds = dict(column.replace("~", " ").split(":") for column in described.split())
    values = {
        name: [KINDS[kind](row) for row in range(LAYOUT_ROWS)] for name, kind in kinds.items()
    }
    table = pyarrow.table(values)
    if expected == "ASK":
        with pytest.raises((DataError, UsageError), match=r"can't tell|looks like|single tokens"):
            choose_columns(table, DataConfig("table"), table="table")
    else:
        found = choose_columns(table, DataConfig("table"), table="table")
        names = [found[one].name if one in found else "-" for one in OPTIONS]
        assert names == expected.replace("~", " ").split(";")
