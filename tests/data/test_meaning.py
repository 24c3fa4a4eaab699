"""Labels, label columns and split columns in the notations that are common in tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
from data_files import load, write

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.load import load_rows
from finetune.data.read import join_tables, read_file
from finetune.errors import DataError, DataNotFoundError, FinetuneError, UsageError
from finetune.tasks.multi import Multi

ROWS = 40
TOPICS = ("price", "team", "food")
COMBINED = ("price", "team", "food", "price{}team", "team{}food", "price")
Columns = dict[str, list[Any]]


def texts(rows: int = ROWS) -> list[str]:
    return [f"The answer number {number} was long, and nobody read it." for number in range(rows)]


def cycle(*values: Any, rows: int = ROWS) -> list[Any]:
    return [values[number % len(values)] for number in range(rows)]


def load_frame(
    path: Path, columns: Columns, **options: Any
) -> tuple[list[str], dict[str, list[Any]], str]:
    """Return the class names, the labels of each split, and all messages."""
    frame = pandas.DataFrame(columns)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        frame.to_parquet(path)
    outcome = load(path, **options)
    labels = {split: [label for _, label in rows] for split, rows in outcome.rows.items()}
    return [*outcome.loaded.task.class_names], labels, outcome.messages


@pytest.mark.parametrize(
    ("labels", "names", "first"),
    [
        *(
            (cycle(*(one.format(separator) for one in COMBINED)), sorted(TOPICS), ["price", "team"])
            for separator in (" / ", "+", "|", "; ", ", ", "\n", " und ", " \u3001 ")
        ),
        (cycle("#price", "#team", "#food", "#price #team"), sorted(TOPICS), ["price", "team"]),
        (cycle("- price", "- team", "- food", "- price\n- team"), sorted(TOPICS),
         ["price", "team"]),
        (cycle("{price}", "{team}", "{food}", "{price,team}"), sorted(TOPICS), ["price", "team"]),
        (cycle("['price']", "['team']", "['food']", "['price' 'team']"), sorted(TOPICS),
         ["price", "team"]),
        (cycle("{'price': 1, 'team': 0}", "{'team': 1}", "[]", "{'price': 1, 'team': 1}"),
         ["price", "team"], ["price", "team"]),
        (cycle("caf\u00e9", "cafe\u0301", "bar", "bar"), ["bar", "caf\u00e9"], "bar"),
        (cycle("['a']", "['b']", "['b']", "['b']"), ["a", "b"], "b"),
        ([f"{number},{number % 10}" for number in range(10, 50)], [], 13.3),
        ([f"{number},50" if number % 2 else str(number) for number in range(40)], [], 3.5),
        ([str(number % 27) for number in range(3 * 27) if number % 27 != 17],
         [str(number) for number in range(27) if number != 17], "3"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)  # fmt: skip
def test_label_notations_are_parsed(
    labels: list[str], names: list[str], first: Any, tmp_path: Path
) -> None:
    columns = {"text": texts(len(labels)), "label": labels}
    found_names, found, _ = load_frame(tmp_path / "a.csv", columns)
    assert found_names == names
    where = labels.index(cycle(*labels, rows=6)[3])
    expected = found["train"][where]
    assert (
        sorted(expected) == sorted(first)
        if isinstance(first, list)
        else expected == (pytest.approx(first))
    )


NO = {"": "x", "nein": "ja", "No": "Yes", "0": "1", "false": "true", "non": "oui", "-": "+"}


@pytest.mark.parametrize(
    ("suffix", "columns", "options", "said"),
    [
        *(
            (".csv", {topic: cycle(*marks) for topic, marks in
                      zip(TOPICS, ((yes, no, yes), (no, yes, yes), (no, yes, no)), strict=True)},
             {"label_column": ",".join(TOPICS)}, "3 classes")
            for no, yes in NO.items()
        ),
        (".csv", {topic: cycle("ja", "nein", *["nein"] * number) for number, topic in
                  enumerate(TOPICS)}, {}, "one column per class"),
        (".csv", {topic: cycle(topic, "", *[""] * number) for number, topic in enumerate(TOPICS)},
         {"empty_labels": "none"}, "one column per class"),
        (".csv", {"code1": cycle("price", "team", "food"), "code2": cycle("team", "", ""),
                  "code3": cycle("food", "", "")}, {"label_column": "code1,code2,code3"}, "labels"),
        (".jsonl", {"labels": cycle(*({"price": own, "team": True} for own in (True, False)))},
         {}, "several labels"),
        (".csv", {"a": cycle("price", "team"), "b": cycle("team", "food")},
         {"label_column": "a,b"}, "several labels"),
    ],
)  # fmt: skip
def test_several_label_columns_give_multi_label_data(
    suffix: str, columns: Columns, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    names, found, messages = load_frame(
        tmp_path / f"t{suffix}", {"text": texts(), **columns}, **options
    )
    assert {*names} <= {*TOPICS}
    assert max(map(len, found["train"])) > 1
    assert said in messages or len(names) == 3


@pytest.mark.parametrize(
    ("first", "second"), [((0, 1), (1, 0)), (("", "x"), ("x", "")), (("no", "yes"), ("yes", "no"))]
)
def test_mutually_exclusive_columns_give_single_label_data(
    first: Any, second: Any, tmp_path: Path
) -> None:
    columns = {"text": texts(), "spam": cycle(*first), "ham": cycle(*second)}
    _, found, said = load_frame(tmp_path / "t.csv", columns, label_column="spam,ham")
    assert found["train"] == cycle("ham", "spam")
    assert "--task multi allows several" in said


VOTES: Columns = {
    "toxic": cycle(5, 0, 1, 2), "insult": cycle(0, 4, 1, 2), "threat": cycle(0, 1, 3, 1)
}  # fmt: skip


@pytest.mark.parametrize(
    "columns",
    [
        VOTES,
        {"toxic": VOTES["toxic"], "insult": [5 - votes for votes in VOTES["toxic"]]},
        {name: [value / 5 for value in values] for name, values in VOTES.items()},
        {name: [f"{20 * value}%" for value in values] for name, values in VOTES.items()},
        {name: [value or None for value in values] for name, values in VOTES.items()},
        {"up": [7 * n % 41 for n in range(ROWS)], "down": [9 * n % 37 for n in range(ROWS)]},
        {"spam": cycle(1, -1), "ham": cycle(-1, 1)},
    ],
)  # fmt: skip
def test_vote_columns_are_rejected(columns: Columns, tmp_path: Path) -> None:
    table, names = {"text": texts(), **columns}, list(columns)
    with pytest.raises(DataError, match="neither a mark, such as 1 or x, nor a class") as raised:
        load_frame(tmp_path / "t.csv", table, label_column=",".join(names))
    remedy = f"frame[{names}].idxmax(axis=1)"
    assert remedy in raised.value.remedy
    if "insult" in columns and "%" not in str(columns):
        with pytest.raises(UsageError, match="which column is the label") as asked:
            load_frame(tmp_path / "t.csv", table)
        assert remedy in asked.value.remedy
        assert ",".join(names) not in asked.value.remedy
        label = pandas.DataFrame(columns)[names].idxmax(axis=1)
        found_names, _, _ = load_frame(tmp_path / "t.csv", table | {"label": label})
        assert {*found_names} <= {*names}


EMPTY: dict[str, Columns] = {
    "lists": {"labels": cycle([])},
    "cells": {"labels": cycle("[]")},
    "scores": {"cats": cycle({"a": 0, "b": 0.1})},
    "columns": {topic: cycle(0) for topic in TOPICS},
    "doccano": {"label": cycle([]), "Comments": cycle([])},
}


@pytest.mark.parametrize("name", EMPTY)
def test_rows_without_any_class_can_be_evaluated_but_not_trained(name: str, tmp_path: Path) -> None:
    path, label = tmp_path / "t.jsonl", ",".join(TOPICS) if name == "columns" else None
    with pytest.raises(DataError, match=r"has a class in .*: all lists are empty"):
        load_frame(path, {"text": texts(), **EMPTY[name]}, label_column=label)
    task = Multi(["a", "b"])
    rows = load_rows(OtherData(str(path), label_column=label), task=task)
    assert task.to_json(task.labels(rows["label"])) == cycle([])


MISSING = [["price"], None, [], ["team", "price"], None]


@pytest.mark.parametrize(
    ("suffix", "columns", "rows", "without"),
    [
        (".jsonl", {"label": cycle(*MISSING)}, 24, 8),
        (".parquet", {"label": cycle(*MISSING)}, 24, 8),
        (".csv", {"label": cycle("price", "", "[]", "team;price", "price;team")}, 32, 8),
        (".csv", {"label": cycle("price", "", "['team', 'price']", "['team']", "")}, 24, 0),
        (".csv", {one: cycle(1, 0, value) for one, value in
                  zip(TOPICS, (1.0, None, 0), strict=True)}, 27, 13),
        (".csv", {one: cycle(*values) for one, values in
                  zip(TOPICS, ((1, 0), (0, 1, None), (0, 1)), strict=True)}, 27, 0),
        (".csv", {"label": cycle(*["price;team"] * 39, "")}, 39, 0),
        (".csv", {"label": cycle("price;team", "price", "team", "none", "")}, 32, 0),
    ],
)  # fmt: skip
def test_missing_labels_are_distinguished_from_empty_ones(
    suffix: str, columns: Columns, rows: int, without: int, tmp_path: Path
) -> None:
    options = {} if "label" in columns else {"label_column": ",".join(TOPICS)}
    _, found, said = load_frame(tmp_path / f"t{suffix}", {"text": texts(), **columns}, **options)
    labels = found["train"]
    assert (len(labels), labels.count([])) == (rows, without)
    assert f"{ROWS - rows:,} of {ROWS} rows skipped" in said


@pytest.mark.parametrize(
    "columns",
    [
        {"label": cycle("price;team", "", "price", "", "team;food", "team")},
        {topic: cycle("x", "", *[""] * number) for number, topic in enumerate(TOPICS)},
        {"code1": cycle("price", "team", ""), "code2": cycle("team", "", "")},
    ],
)
def test_many_empty_labels_require_an_option(columns: Columns, tmp_path: Path) -> None:
    table, label = {"text": texts(), **columns}, ",".join(columns)
    with pytest.raises(UsageError, match="have no label") as raised:
        load_frame(tmp_path / "t.csv", table, label_column=label)
    assert "--empty-labels unlabeled" in raised.value.remedy
    options = {"label_column": label}
    _, of_none, _ = load_frame(tmp_path / "t.csv", table, empty_labels="none", **options)
    _, skipped, _ = load_frame(tmp_path / "t.csv", table, empty_labels="unlabeled", **options)
    assert len(of_none["train"]) == ROWS > len(skipped["train"])


LONG = {"text": [text for text in texts(30) for _ in "ab"], "label": cycle(*TOPICS, rows=60)}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_one_row_per_text_and_label_requires_an_option(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"60 rows of .* contain 30 texts") as raised:
        load_frame(tmp_path / f"t{suffix}", LONG)
    assert "--task multi" in raised.value.remedy
    _, found, _ = load_frame(tmp_path / f"t{suffix}", LONG, task="multi")
    assert [*map(len, found["train"])] == [2] * 30
    assert len(load_frame(tmp_path / f"t{suffix}", LONG, task="single")[1]["train"]) == 60


@pytest.mark.parametrize(
    ("number", "name"),
    [("label", "label_text"), ("y", "topic"), ("target", "target_names"), ("class", "Klasse"),
     ("label_id", "label_name")],
)  # fmt: skip
def test_class_numbers_are_replaced_by_a_name_column(
    number: str, name: str, tmp_path: Path
) -> None:
    columns = {"text": texts(), number: cycle(0, 1, 2), name: cycle("world", "sport", "art")}
    assert load_frame(tmp_path / "t.csv", columns)[0] == ["art", "sport", "world"]
    assert load_frame(tmp_path / "t.csv", columns, label_column=number)[0] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "values", "splits"),
    [
        ("usage", ("train", "train", "dev"), {"train", "validation"}),
        ("Partition", ("Training", "Training", "Holdout"), {"train", "test"}),
        ("conjunto", ("entrenamiento", "entrenamiento", "prueba"), {"train", "test"}),
        ("part", ("train_set", "valid_set", "eval_set"), {"train", "validation", "test"}),
        ("is_valid", ("False", "False", "True"), {"train", "validation"}),
        ("is_train", (1, 1, 0), {"train", "test"}),
        ("数据集", ("训练集", "训练集", "测试集"), {"train", "test"}),
        ("fold", (0, 1, 2), None),
        ("split", ("train", "extra", "test"), None),
        ("set", (1, 1, 2), None),
        ("kfold", (0, 1, 2, 3, 4), None),
        ("data_split", ("a", "train", "b"), None),
    ],
)
def test_split_column_is_used_or_rejected_if_ambiguous(
    name: str, values: tuple[Any, ...], splits: set[str] | None, tmp_path: Path
) -> None:
    table = {"text": texts(), "label": cycle("a", "b", "b", "a"), name: cycle(*values)}
    if splits is None:
        with pytest.raises(UsageError, match=name) as raised:
            load_frame(tmp_path / "t.csv", table)
        assert "--split-column" in raised.value.remedy
    else:
        assert set(load_frame(tmp_path / "t.csv", table)[1]) == splits
    assert set(load_frame(tmp_path / "t.csv", table, split_column="none")[1]) == {"train"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"label": cycle("yes", "Yes", "no", "NO")}, "case, spaces or dashes: 'NO', 'no'"),
        ({"label": cycle("to do", "to-do", "done")}, "differ only in case"),
        ({"label": cycle("a", "b"), "when": cycle("2024-05-01"), "url": cycle("x.org")},
         "columns not used: 'when', 'url'"),
        ({"label": cycle("a", "b", ""), "id": [f"k{n}" for n in range(ROWS)]},
         "the first in line 4 of {} (id k2)"),
        *(
            ({"label": cycle("a", "b", ""), name: [str(7000 + n) for n in range(ROWS)]},
             f"the first in line 4 of {{}} ({name} 7002)")
            for name in ("Ticketnummer", "No.", "Vorgang", "número", "编号")
        ),
        ({"text": [*texts(38), "nan", "None"], "label": cycle("a", "b")},
         "2 texts of {} look like a missing text, such as 'nan'"),
        ({"text": [*texts(39), "NULL"], "label": cycle("a", "b")}, "such as 'NULL'"),
        *(
            ({"text": [*texts(39), total], "label": [*cycle("a", "b", rows=39), "39"]},
             "ignoring the last row of {}, which is a total")
            for total in ("Total", "Summe:", "Gesamt", "TOTAL", "итого", "合計")
        ),
        ({"text": [*texts(39), "39"], "label": [*cycle("a", "b", rows=39), "Grand total"]},
         "which is a total"),
        ({"label": [("a", "b")[n // 10 % 2] if n % 10 == 0 else "" for n in range(ROWS)]},
         "only in the first row of each group"),
    ],
)  # fmt: skip
def test_data_problems_are_reported_on_one_line(
    columns: Columns, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    names, _, messages = load_frame(path, {"text": texts(), **columns})
    assert said.format(path) in messages
    assert not {"39", "Grand total"} & {*names}


def test_labels_only_in_the_first_row_of_each_group_are_rejected(tmp_path: Path) -> None:
    labels = [f"class {number}" if number % 10 == 0 else "" for number in range(ROWS)]
    with pytest.raises(DataError, match="only in the first row of each group") as raised:
        load_frame(tmp_path / "t.csv", {"text": texts(), "label": labels})
    assert "ffill" in raised.value.remedy


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"label": cycle("{'a': 0.7, 'b': 0.3}", "{'a': 0.2, 'b': 0.8}")}, {}),
        ({"label": cycle("['a', 'b']", "['b']")}, {"task": "single"}),
        ({"label": cycle("1.234,50", *(f"{n}.000,25" for n in range(1, 30)))}, {}),
        ({"a": texts(), "b": texts()[::-1]}, {"label_column": "a,b"}),
        ({"a": cycle("x", "o"), "b": cycle("o", "x")}, {"label_column": "a,b"}),
    ],
)
def test_unreadable_labels_are_rejected(
    columns: Columns, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError) as raised:
        load_frame(tmp_path / "t.csv", {"text": texts(), **columns}, **options)
    assert raised.value.remedy


TRAIN = "text,label\na,x\nb,y\n"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_labels_missing_in_training_are_rejected_or_skipped(tmp_path: Path, split: str) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    other = write(tmp_path / "other.csv", "text,label\nc,x\n,\nd,z\ne,w\nf,z\n")
    files: dict[str, Any] = {f"{split}_file": str(other)}
    with pytest.raises(
        DataError, match=rf"the {split} split has labels .*: 'z' \(2\), 'w' \(1\)"
    ) as raised:
        load(train, **files)
    assert "'z' in line 4 of" in raised.value.message
    assert "--skip-unknown-labels" in raised.value.remedy
    outcome = load(train, skip_unknown_labels=True, **files)
    assert outcome.rows[split] == [("c", "x")]
    skipped = f"3 rows of the {split} split skipped: no training row has 'z' (2), 'w' (1)"
    assert skipped in outcome.warnings
    write(other, "text,label\nc,-1\nd,-1.0\n")
    outcome = load(train, skip_unknown_labels=True, **files)
    assert {*outcome.rows} == {*outcome.loaded.places} == {"train"}
    assert f"the {split} split is ignored: no rows are left" in outcome.warnings


def test_rows_without_text_or_label_are_skipped_and_counted(tmp_path: Path) -> None:
    content = 'text,label\na,x\n"over\ntwo lines",y\n" ",x\nc,\nd,y\n'
    outcome = load(write(tmp_path / "rows.csv", content))
    assert outcome.rows["train"] == [("a", "x"), ("over\ntwo lines", "y"), ("d", "y")]
    [message] = outcome.warnings
    assert message.startswith("2 of 5 rows skipped")
    assert f"line 5 of {tmp_path / 'rows.csv'}" in message


SPLIT_ROWS = "text,split,label\na 1,train,x\nb 2,Dev,y\nc 3,test,x\nd 4,train,y\n"


def test_split_column_is_guessed_set_or_ignored(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", SPLIT_ROWS)
    outcome = load(table)
    assert {split: [text for text, _ in rows] for split, rows in outcome.rows.items()} == {
        **{"train": ["a 1", "d 4"], "validation": ["b 2"], "test": ["c 3"]}
    }
    assert "'split'" in outcome.messages
    whole = load(table, split_column="none").loaded
    assert whole.splits["train"].num_rows == 4
    assert load_rows(OtherData(str(table)), task=whole.task).num_rows == 4
    other = write(
        tmp_path / "other.csv", SPLIT_ROWS.replace("split", "use").replace("test", "Testing")
    )
    assert len(load(other, split_column="use").rows) == 3
    odd = write(tmp_path / "odd.csv", SPLIT_ROWS.replace("Dev", "b"))
    with pytest.raises(UsageError, match=r"'split' of .*: 'b', 'test', 'train'"):
        load(odd)
    with pytest.raises(DataError, match=r"'label' of .* doesn't contain a split"):
        load(table, split_column="label")
    with pytest.raises(DataNotFoundError, match="no column 'use'"):
        load(table, split_column="use")
    with pytest.raises(UsageError, match="one file"):
        load(table, split_column="split", test_file=str(other))


def test_joined_split_files_keep_the_location_of_each_row(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "1.csv", "text,label,id\na,x,1\nb,y,2\n"),
        write(tmp_path / "2.csv", "text,label\nc,x\nd,y\n"),
    ]
    table = join_tables([read_file(path, DataConfig()) for path in files])
    assert table.columns.to_pydict() == {"text": ["a", "b", "c", "d"], "label": ["x", "y"] * 2}
    assert table.place(2) == f"line 3 of {files[0]}"
    assert table.place(3) == f"line 2 of {files[1]}"


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ("0 2 1", "a b  c", ["a", "c", "b"]),
        ("1 3 2", "a b  c", ["a", "c", "b"]),
        ("0.0 1 -1", "a b  c", ["a", "b"]),
        ("0 3", "a b", "don't match the classes .* such as '3'"),
        ("0 x", "a b", "such as 'x'"),
        ("0 1", "a a", "the 2 lines of"),
    ],
)
def test_class_numbers_are_mapped_to_lines_of_the_names_file(
    labels: str, names: str, expected: list[str] | str, tmp_path: Path
) -> None:
    file = write(tmp_path / "names.txt", names.replace(" ", "\n"))
    rows = "".join(f"a text {label},{label}\n" for label in labels.split())
    table = write(tmp_path / "rows.csv", "text,label\n" + rows)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            load(table, label_names=str(file))
    else:
        outcome = load(table, label_names=str(file))
        assert outcome.loaded.task.class_names == names.split()
        assert [label for _, label in outcome.rows["train"]] == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("said,mood", "said,mood"),
        ("said,mood", "\ufeffsaid,mood"),
        ("\ufeffsaid,mood", "\ufeffsaid,mood"),
        ("\ufeffsaid,mood", '\ufeff"said","mood"'),
        ("said,mood", "Said, Mood"),
    ],
)
@pytest.mark.parametrize("header", [True, None])
def test_repeated_header_is_skipped(
    tmp_path: Path, first: str, second: str, header: bool | None
) -> None:
    rows = "".join(f"film {number} was long,{'ab'[number % 2]}\n" for number in range(9))
    table = write(tmp_path / "a.csv", f"{first}\n{rows}{second}\n{rows}")
    outcome = load(table, header=header)
    assert len(outcome.rows["train"]) == 18
    assert outcome.loaded.task.class_names == ["a", "b"]
    assert (
        f"skipping 1 rows that repeat the header, the first in line 11 of {table}"
        in outcome.messages
    )


@pytest.mark.parametrize(
    ("labels", "warned"),
    [(("yes", "no", "?"), "'?'"), (("a", "Unknown", "-"), "'-', 'Unknown'"),
     (("0", "1", "2", "-1"), "'-1'"), (("-1", "0", "1"), None)],
)  # fmt: skip
def test_class_names_that_may_be_missing_labels_are_reported(
    tmp_path: Path, labels: Sequence[str], warned: str | None
) -> None:
    rows = "".join(f"film {row},{labels[row % len(labels)]}\n" for row in range(12))
    outcome = load(write(tmp_path / "a.csv", f"text,label\n{rows}"))
    expected = f"class names that usually mean a missing label: {warned}"
    assert outcome.warnings == ([expected] if warned else [])


def test_label_lists_with_repeated_texts_are_multi_label(tmp_path: Path) -> None:
    columns = {"text": [*texts(20), *texts(20)], "label": [*[["a", "b"]] * 20, *[[]] * 20]}
    _, found, _ = load_frame(tmp_path / "t.jsonl", columns)
    assert [*map(len, found["train"])] == [2] * 20 + [0] * 20


def test_text_that_starts_with_total_is_a_row(tmp_path: Path) -> None:
    columns = {"text": [*texts(39), "Total waste of money"], "label": cycle(0, 1)}
    assert len(load_frame(tmp_path / "t.csv", columns)[1]["train"]) == ROWS
