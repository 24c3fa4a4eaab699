"""Tables written as public ones are: the right columns and kind are guessed, or asked for."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from finetune.config.schema import DataConfig
from finetune.data.columns import choose_columns, read_labels
from finetune.data.read import read_file
from finetune.errors import DataError, UsageError
from finetune.tasks.choose import AUTO, choose_task_type

ROWS = 90
VALUES = {
    "id": lambda n: str(1000 + 7 * n),
    "text": lambda n: f"The film number {n} was long and {'good' if n % 3 else 'bad'} at its end.",
    "other": lambda n: f"A story {n} about rivers is told at {'length' if n % 2 else 'night'}.",
    "long": lambda n: f"Part {n} has words that nobody reads to their end. " * 60,
    "title": lambda n: f"Number {n} of many",
    "flag": lambda n: str(n % 2),
    "rare": lambda n: str(int(n % 7 == 0)),
    "often": lambda n: str(int(n % 5 > 0)),
    "unsure": lambda n: str(n % 9 == 0),
    "word": lambda n: ("contradiction", "neutral", "entailment")[n % 3],
    "genre": lambda n: ("main-captions", "main-news", "main-forums")[n % 3],
    "year": lambda n: f"201{n % 5}test",
    "none": lambda _: "none",
    "star": lambda n: str(1 + n % 5),
    "score": lambda n: str(n % 26 / 5),
    "list": lambda n: ("0,15", "3", "15,3", "0")[n % 4],
    "json": lambda n: ("[0, 15]", "[3]", "[]", "[0]")[n % 4],
    "bars": lambda n: ("joy|fear", "joy", "fear", "fear|anger")[n % 4],
    "date": lambda n: f"2021-0{1 + n % 9}-1{n % 10}",
    "verdict": lambda n: "rejected" if n % 8 == 0 else "approved",
    "count": lambda n: str(n * n % 17),
    "hash": lambda n: f"{n * 7919:016x}f00d",
    "url": lambda n: f"https://films.example/reviews/of-a-very-long-name/{n}",
    "path": lambda n: f"reviews/train/pos/{n}_of_many_films_that_are_long.txt",
    "part": lambda n: "train" if n % 4 else "test",
    "team": lambda n: f"team {'abcdefghijklmno'[n % 15]}",
    "answer": lambda n: "YES" if n % 3 else "NO",
    "token": lambda n: ("Berlin", "is", "old", "and", "Anna", "knows", "it", "well", ".")[n % 9],
    "tag": lambda n: ("B-LOC", "O", "O", "O", "B-PER", "O", "O", "O", "O")[n % 9],
    "first": lambda n: str(int(n % 3 == 0)),
    "second": lambda n: str(int(n % 3 == 1)),
    "third": lambda n: str(int(n % 3 == 2)),
}


def write_table(path: Path, header: str, kinds: str) -> DataConfig:
    rows = [[VALUES[kind](n) for kind in kinds.split()] for n in range(ROWS)]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([header.split(",")] * bool(header) + rows)
    return DataConfig(str(path))


@pytest.mark.parametrize(
    ("header", "kinds", "expected", "task"),
    [
        ("Quality,#1 ID,#2 ID,#1 String,#2 String", "flag id id text other", (3, 4, 0), "single"),
        ("id,qid1,qid2,question1,question2,is_duplicate", "id id id text other flag",
         (3, 4, 5), "single"),
        ("gold_label,sentence1,sentence2,captionID,pairID,label1,label2",
         "word text other id id word word", (1, 2, 0), "single"),
        ("index,premise,hypothesis,label", "id text other flag", (1, 2, 3), "single"),
        ("index,question,sentence,label", "id title text word", (1, 2, 3), "single"),
        ("pair_ID,sentence_A,sentence_B,entailment_label", "id text other word",
         (1, 2, 3), "single"),
        ("index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score",
         "id genre word year count none none text other score", (7, 8, 9), "regression"),
        ("sentence1,sentence2,similarity_score", "text other score", (0, 1, 2), "regression"),
        ("id,excerpt,target,standard_error", "id long score score", (1, None, 2), "regression"),
        ("review,sentiment", "long flag", (0, None, 1), "single"),
        ("text,sentiment,score", "text word score", (0, None, 1), "single"),
        ("review_id,stars,useful,funny,cool,text,date", "id star count count count long date",
         (5, None, 1), "single"),
        ("label,name,content", "flag title text", (2, None, 0), "single"),
        ("tweet_id,airline_sentiment,airline,retweet_count,text,tweet_created",
         "id word flag count text date", (4, None, 1), "single"),
        ("", "word text", (1, None, 0), "single"),
        ("", "text list id", (0, None, 1), "multi"),
        ("text,labels,id", "text json id", (0, None, 1), "multi"),
        ("ID,Tweet,emotion", "id text bars", (1, None, 2), "multi"),
        ("uid,hash,permalink,file,said,mood", "hash hash url path text flag",
         (4, None, 5), "single"),
        ("part,said,topic_name", "part text word", (1, None, 2), "single"),
        ("sent1,sent2,label", "text other flag", (0, 1, 2), "single"),
        ("id,q1,q2,same", "id text other flag", (1, 2, 3), "single"),
        ("string1,string2,score", "text other score", (0, 1, 2), "regression"),
        ("source text,target text,label", "text other flag", (0, 1, 2), "single"),
        ("annotator_1,annotator_2,label_final,said", "flag flag flag text", (3, None, 2), "single"),
        ("said,is_reply,has_link,verified,topic", "text flag rare flag word",
         (0, None, 4), "single"),
    ],
)  # fmt: skip
def test_the_right_columns_and_kind_are_guessed(
    header: str, kinds: str, expected: Sequence[int | None], task: str, tmp_path: Path
) -> None:
    options = write_table(tmp_path / "table.tsv", header, kinds)
    columns = read_file(tmp_path / "table.tsv", options).columns
    found = choose_columns(columns, options, table="table.tsv")
    names = [None if place is None else columns.column_names[place] for place in expected]
    options_of = ("text_column", "text_pair_column", "label_column")
    assert [found[one].name if one in found else None for one in options_of] == names
    labels = columns[found["label_column"].name].to_pylist()
    assert choose_task_type(AUTO, labels, names=None)[0].name == task


@pytest.mark.parametrize(
    ("header", "kinds", "text", "flags"),
    [
        ("id,comment_text,toxic,severe_toxic,obscene,threat,insult,identity_hate",
         "id text flag rare rare rare flag rare", 1, slice(2, 8)),
        ("ID,Tweet,anger,joy,love,trust", "id text flag rare flag often", 1, slice(2, 6)),
        ("text,id,author,created_utc,rater_id,example_very_unclear,admiration,anger,joy,neutral",
         "text id title id count unsure rare flag often rare", 0, slice(6, 10)),
    ],
)  # fmt: skip
def test_columns_of_0_and_1_are_labels_of_several_classes(
    header: str, kinds: str, text: int, flags: slice, tmp_path: Path
) -> None:
    options = write_table(tmp_path / "table.tsv", header, kinds)
    columns = read_file(tmp_path / "table.tsv", options).columns
    names = header.split(",")
    found = choose_columns(columns, options, table="table.tsv")
    assert found["label_column"].name == ",".join(names[flags])
    assert found["text_column"].name == names[text]
    assert "text_pair_column" not in found
    labels = read_labels(columns, found["label_column"].names).to_pylist()
    assert choose_task_type(AUTO, labels, names=None)[0].name == "multi"


@pytest.mark.parametrize(
    ("header", "kinds", "said"),
    [
        ("headline,body,label", "other text flag", "--text-pair-column"),
        *(
            (f"{one},{two},label", "other long flag", f"-column {one} --text-pair-column {two}")
            for one, two in (("query", "document"), ("claim", "evidence"), ("headline", "body"),
                             ("question", "answer"))
        ),
        ("a,b,label", "text other flag", "--text-column a --text-pair-column b"),
        ("label,title,content", "flag other long", "--text-column title,content"),
        ("Class Index,Title,Description", "star other text", "--text-column Title,Description"),
        ("title,text,label", "other long flag", "--text-column title,text"),
        ("said,label_gold,label_ident", "text flag team", "--label-column"),
        ("said,label_1,label_2,label_final", "text flag flag flag", "--label-column"),
        ("said,rating,recommended", "text star answer", "--label-column"),
        ("said,priority,team", "text word team", "--label-column"),
        ("said,is_reply,has_link,verified", "text flag rare often", "--label-column"),
        ("said,red,green,blue", "text first second third", "--label-column"),
        ("said,red,green,by,blue", "text flag rare word often", "--label-column"),
        ("text,target,rating", "text score star", "--label-column"),
        ("id,target,comment_text,severe_toxicity,created_date,rating,funny,likes",
         "id score text score date verdict count count", "--label-column"),
        ("split,topic", "part word", "looks like texts"),  # the texts are elsewhere
        ("key,topic", "hash word", "looks like texts"),
        ("address,topic", "url word", "looks like texts"),
        ("file,topic", "path word", "looks like texts"),
        ("code,topic", "count word", "looks like texts"),
        ("token,tag", "token tag", "single tokens, with tags in 'tag'"),
        ("", "token tag", "single tokens"),
    ],
)  # fmt: skip
def test_what_is_open_is_asked_for_and_a_table_without_texts_refused(
    header: str, kinds: str, said: str, tmp_path: Path
) -> None:
    options = write_table(tmp_path / "table.tsv", header, kinds)
    columns = read_file(tmp_path / "table.tsv", options).columns
    with pytest.raises((DataError, UsageError)) as raised:
        choose_columns(columns, options, table="table.tsv")
    assert said in f"{raised.value.message}; {raised.value.remedy}"
