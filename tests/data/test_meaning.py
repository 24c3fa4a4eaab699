"""Labels and columns as people and programs write them: read correctly, or rejected."""

import json
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest

from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.errors import DataError, FinetuneError, UsageError
from finetune.events import Event, Info, WarningMessage, sent_to

ROWS = 40
TOPICS = ("price", "team", "food")
COMBINED = ("price", "team", "food", "price{}team", "team{}food", "price")
Columns = dict[str, list[Any]]


def texts(rows: int = ROWS) -> list[str]:
    return [f"The answer number {number} was long, and nobody read it." for number in range(rows)]


def cycle(*values: Any, rows: int = ROWS) -> list[Any]:
    return [values[number % len(values)] for number in range(rows)]


def load(
    path: Path, columns: Columns, **options: Any
) -> tuple[list[str], dict[str, list[Any]], str]:
    """Return class names, the labels of each split by name, and all messages."""
    frame = pandas.DataFrame(columns)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        frame.to_parquet(path)
    emitted: list[Event] = []
    with sent_to(emitted.append):
        loaded = load_data(DataConfig(str(path), **options))
    found = {
        split: loaded.task.to_json(loaded.task.labels(rows.data["label"]))
        for split, rows in loaded.splits.items()
    }
    said = "\n".join(
        f"{event.message}; {getattr(event, 'remedy', '')}"
        for event in emitted
        if isinstance(event, Info | WarningMessage)
    )
    return [*loaded.task.class_names], found, said


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
        (cycle("<price>", "<team>", "<food>", "<price><team>"), sorted(TOPICS),
         ["price", "team"]),
        (cycle("caf\u00e9", "cafe\u0301", "bar", "bar"), ["bar", "caf\u00e9"], "bar"),
        (cycle("['a']", "['b']", "['b']", "['b']"), ["a", "b"], "b"),
        ([f"{number},{number % 10}" for number in range(10, 50)], [], 13.3),
        ([f"{number},50" if number % 2 else str(number) for number in range(40)], [], 3.5),
        ([str(number % 27) for number in range(3 * 27) if number % 27 != 17],
         [str(number) for number in range(27) if number != 17], "3"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)  # fmt: skip
def test_labels_are_what_they_say(
    labels: list[str], names: list[str], first: Any, tmp_path: Path
) -> None:
    columns = {"text": texts(len(labels)), "label": labels}
    found_names, found, _ = load(tmp_path / "a.csv", columns)
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
                  enumerate(TOPICS)}, {}, "a column for each class"),
        (".csv", {topic: cycle(topic, "", *[""] * number) for number, topic in enumerate(TOPICS)},
         {"empty_labels": "none"}, "a column for each class"),
        (".csv", {"code1": cycle("price", "team", "food"), "code2": cycle("team", "", ""),
                  "code3": cycle("food", "", "")}, {"label_column": "code1,code2,code3"}, "lists"),
        (".jsonl", {"labels": cycle(*({"price": own, "team": True} for own in (True, False)))},
         {}, "lists"),
        (".csv", {"a": cycle("price", "team"), "b": cycle("team", "food")},
         {"label_column": "a,b"}, "lists"),
    ],
)  # fmt: skip
def test_several_columns_are_several_labels(
    suffix: str, columns: Columns, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    names, found, messages = load(tmp_path / f"t{suffix}", {"text": texts(), **columns}, **options)
    assert {*names} <= {*TOPICS}
    assert max(map(len, found["train"])) > 1
    assert said in messages or len(names) == 3


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
def test_a_missing_label_is_no_empty_one(
    suffix: str, columns: Columns, rows: int, without: int, tmp_path: Path
) -> None:
    options = {} if "label" in columns else {"label_column": ",".join(TOPICS)}
    _, found, said = load(tmp_path / f"t{suffix}", {"text": texts(), **columns}, **options)
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
def test_many_empty_labels_are_asked_about(columns: Columns, tmp_path: Path) -> None:
    table, label = {"text": texts(), **columns}, ",".join(columns)
    with pytest.raises(UsageError, match="have no label") as raised:
        load(tmp_path / "t.csv", table, label_column=label)
    assert "--empty-labels unlabeled" in raised.value.remedy
    counts = [
        len(load(tmp_path / "t.csv", table, label_column=label, empty_labels=choice)[1]["train"])
        for choice in ("none", "unlabeled")
    ]
    assert counts[0] == ROWS > counts[1]


LONG = {"text": [text for text in texts(30) for _ in "ab"], "label": cycle(*TOPICS, rows=60)}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_one_row_per_text_and_label_is_asked_about(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"60 rows of .* have 30 texts") as raised:
        load(tmp_path / f"t{suffix}", LONG)
    assert "--task multi" in raised.value.remedy
    _, found, _ = load(tmp_path / f"t{suffix}", LONG, task="multi")
    assert [*map(len, found["train"])] == [2] * 30
    assert len(load(tmp_path / f"t{suffix}", LONG, task="single")[1]["train"]) == 60


@pytest.mark.parametrize(
    ("number", "name"),
    [("label", "label_text"), ("y", "topic"), ("target", "target_names"), ("class", "Klasse"),
     ("label_id", "label_name")],
)  # fmt: skip
def test_numbers_of_classes_have_their_names_beside_them(
    number: str, name: str, tmp_path: Path
) -> None:
    columns = {"text": texts(), number: cycle(0, 1, 2), name: cycle("world", "sport", "art")}
    assert load(tmp_path / "t.csv", columns)[0] == ["art", "sport", "world"]
    assert load(tmp_path / "t.csv", columns, label_column=number)[0] == ["0", "1", "2"]


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
def test_a_column_of_splits_is_used_or_asked_about(
    name: str, values: tuple[Any, ...], splits: set[str] | None, tmp_path: Path
) -> None:
    table = {"text": texts(), "label": cycle("a", "b", "b", "a"), name: cycle(*values)}
    if splits is None:
        with pytest.raises(UsageError, match=name) as raised:
            load(tmp_path / "t.csv", table)
        assert "--split-column" in raised.value.remedy
    else:
        assert set(load(tmp_path / "t.csv", table)[1]) == splits
    assert set(load(tmp_path / "t.csv", table, split_column="none")[1]) == {"train"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"label": cycle("yes", "Yes", "no", "NO")}, "case, spaces or dashes: 'NO', 'no'"),
        ({"label": cycle("to do", "to-do", "done")}, "differ only in case"),
        ({"label": cycle("a", "b"), "when": cycle("2024-05-01"), "url": cycle("x.org")},
         "columns not used: 'when', 'url'"),
        ({"label": cycle("a", "b", ""), "id": [f"k{n}" for n in range(ROWS)]},
         "the first in line 4 of {} (id k2)"),
        ({"text": [*texts(38), "nan", "None"], "label": cycle("a", "b")},
         "2 texts of {} look like a missing text, such as 'nan'"),
        ({"text": [*texts(39), "NULL"], "label": cycle("a", "b")}, "such as 'NULL'"),
        ({"text": [*texts(37), "Größe", "Καλημέρα", "café".encode().decode("cp1252")],
          "label": cycle("a", "b")}, "1 texts of {} look like UTF-8 that was decoded as another"),
        *(
            ({"text": [*texts(39), total], "label": [*cycle("a", "b", rows=39), "39"]},
             "the last row of {} is a total and is left out")
            for total in ("Total", "Summe:", "Gesamt", "TOTAL", "итого", "合計")
        ),
        ({"text": [*texts(39), "39"], "label": [*cycle("a", "b", rows=39), "Grand total"]},
         "is a total and is left out"),
        ({"label": [("a", "b")[n // 10 % 2] if n % 10 == 0 else "" for n in range(ROWS)]},
         "only in the first row of each group"),
    ],
)  # fmt: skip
def test_what_is_odd_is_said_in_a_line(columns: Columns, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    names, _, messages = load(path, {"text": texts(), **columns})
    assert said.format(path) in messages
    assert not {"39", "Grand total"} & {*names}


def test_labels_only_in_the_first_row_of_each_group_are_refused(tmp_path: Path) -> None:
    labels = [f"class {number}" if number % 10 == 0 else "" for number in range(ROWS)]
    with pytest.raises(DataError, match="only in the first row of each group") as raised:
        load(tmp_path / "t.csv", {"text": texts(), "label": labels})
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
def test_what_can_not_be_read_is_refused(
    columns: Columns, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError) as raised:
        load(tmp_path / "t.csv", {"text": texts(), **columns}, **options)
    assert raised.value.remedy
