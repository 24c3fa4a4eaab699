"""Tables written as public ones are: the right columns are guessed, or asked for."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from finetune.data.columns import choose_columns
from finetune.data.files import read_file
from finetune.data.source import DataOptions
from finetune.errors import DataError
from finetune.events import ignore

ROWS = 60
VALUES = {
    "id": lambda n: str(1000 + 7 * n),
    "text": lambda n: f"The film number {n} was long and {'good' if n % 3 else 'bad'} at its end.",
    "other": lambda n: f"A story {n} about rivers is told at {'length' if n % 2 else 'night'}.",
    "long": lambda n: f"Part {n} has words that nobody reads to their end. " * 60,
    "title": lambda n: f"Number {n} of many",
    "flag": lambda n: str(n % 2),
    "word": lambda n: ("contradiction", "neutral", "entailment")[n % 3],
    "star": lambda n: str(1 + n % 5),
    "score": lambda n: str(n % 26 / 5),
    "list": lambda n: ("0,15", "3", "15", "0")[n % 4],
    "date": lambda n: f"2021-0{1 + n % 9}-1{n % 10}",
    "count": lambda n: str(n * n % 17),
}


@pytest.mark.parametrize(
    ("header", "kinds", "expected"),
    [
        ("Quality,#1 ID,#2 ID,#1 String,#2 String", "flag id id text other", (3, 4, 0)),
        ("id,qid1,qid2,question1,question2,is_duplicate", "id id id text other flag", (3, 4, 5)),
        ("gold_label,sentence1,sentence2,captionID,pairID", "word text other id id", (1, 2, 0)),
        ("index,premise,hypothesis,label", "id text other flag", (1, 2, 3)),
        ("index,question,sentence,label", "id title text word", (1, 2, 3)),
        ("pair_ID,sentence_A,sentence_B,entailment_label", "id text other word", (1, 2, 3)),
        ("index,sentence1,sentence2,score", "id text other score", (1, 2, 3)),
        ("review,sentiment", "long flag", (0, None, 1)),
        ("review_id,stars,useful,funny,cool,text,date", "id star count count count long date",
         (5, None, 1)),
        ("label,title,content", "flag title text", (2, None, 0)),
        ("tweet_id,airline_sentiment,airline,retweet_count,text,tweet_created",
         "id word flag count text date", (4, None, 1)),
        ("", "word text", (1, None, 0)),
        ("headline,body,label", "other text flag", "--text-column"),
        ("", "text list id", (0, None, 1)),
        ("Class Index,Title,Description", "star title text", (2, None, 0)),
    ],
)  # fmt: skip
def test_the_right_columns_are_guessed_or_asked_for(
    header: str, kinds: str, expected: Sequence[int | None] | str, tmp_path: Path
) -> None:
    rows = [[VALUES[kind](n) for kind in kinds.split()] for n in range(ROWS)]
    path = tmp_path / "table.tsv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([header.split(",")] * bool(header) + rows)
    options = DataOptions(str(path), "")
    columns = read_file(path, options, emit=ignore).columns
    if isinstance(expected, str):
        with pytest.raises(DataError) as raised:
            choose_columns(columns, options, table="table.tsv")
        assert expected in raised.value.remedy
        return
    found = choose_columns(columns, options, table="table.tsv")
    names = [None if place is None else columns.column_names[place] for place in expected]
    assert [found.text.name, found.pair and found.pair.name, found.label.name] == names
