"""Tables in common layouts: the correct columns are chosen, or the command exits with options.

A line of layouts.txt has names and kinds of columns, and the text, second text and label.
"""

import hashlib
import random
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from finetune.config.schema import DataConfig
from finetune.data.columns import OPTIONS, choose_columns
from finetune.errors import DataError, UsageError

LAYOUTS = Path(__file__).with_name("layouts.txt").read_text(encoding="utf-8").splitlines()
ROWS = 120
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
def test_the_right_columns_are_taken_or_asked_for(layout: str) -> None:
    described, _, expected = layout.partition(" = ")
    RANDOM.seed(1)
    kinds = dict(column.replace("~", " ").split(":") for column in described.split())
    values = {name: [KINDS[kind](row) for row in range(ROWS)] for name, kind in kinds.items()}
    table = pyarrow.table(values)
    if expected == "ASK":
        with pytest.raises((DataError, UsageError), match=r"can't tell|looks like|single tokens"):
            choose_columns(table, DataConfig("table"), table="table")
    else:
        found = choose_columns(table, DataConfig("table"), table="table")
        names = [found[one].name if one in found else "-" for one in OPTIONS]
        assert names == expected.replace("~", " ").split(";")
