"""Files of rows as tables of texts and classes."""

import csv
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from finetune.data.source import DataOptions
from finetune.data.tables import read_tables
from finetune.errors import DataError, DataNotFound
from finetune.events import Event, Info, WarningMessage

# A greeting and a farewell in twenty languages, each with an emoji and over two lines.
LANGUAGES = {
    "ar": "صباح الخير",
    "bn": "শুভ সকাল",
    "cs": "Dobré ráno",
    "da": "Godmorgen",
    "de": "Schöne Grüße",
    "el": "Καλημέρα",
    "en": "Good morning",
    "es": "¡Buenos días!",
    "fi": "Hyvää huomenta",
    "fr": "Ça va bien ?",
    "he": "בוקר טוב",
    "hi": "सुप्रभात",
    "ja": "おはようございます",
    "ko": "좋은 아침입니다",
    "pl": "Dzień dobry",
    "ru": "Доброе утро",
    "ta": "காலை வணக்கம்",
    "th": "อรุณสวัสดิ์",
    "tr": "Teşekkürler, İzmir",
    "zh": "早上好",
}


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def read(
    train: Path,
    *,
    emitted: list[Event] | None = None,
    text: str | None = None,
    label: str | None = None,
    data: str = "",
    skip_unknown_labels: bool = False,
    **others: Path,
) -> DatasetDict:
    files = {"train": train, **others}
    return read_tables(
        {split: [path] for split, path in files.items()},
        DataOptions(
            data,
            "",
            text_column=text,
            label_column=label,
            skip_unknown_labels=skip_unknown_labels,
        ),
        emit=([] if emitted is None else emitted).append,
    ).splits


def rows_of(table: Dataset) -> list[tuple[str, str]]:
    names = table.features["label"].names
    return [(row["text"], names[row["label"]]) for row in table]


def classes_of(table: DatasetDict) -> list[str]:
    names: list[str] = table["train"].features["label"].names
    return names


def warnings_in(emitted: list[Event]) -> list[str]:
    return [event.message for event in emitted if isinstance(event, WarningMessage)]


def test_texts_in_twenty_languages_arrive_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        (f'{greeting} {emoji}\n"{greeting}", {number}; | \t', language)
        for language, greeting in LANGUAGES.items()
        for number, emoji in enumerate(("😀", "👩🏽‍🚀", "🇨🇭", "❤️"))
    ]
    with (tmp_path / "greetings.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "language"), *rows])
    table = read(tmp_path / "greetings.csv", label="language")
    assert rows_of(table["train"]) == rows
    assert classes_of(table) == sorted(LANGUAGES)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["30", "7", "100"], ["7", "30", "100"]),
        (["3.0", "7.0", "-1.0"], ["-1", "3", "7"]),
        (["pear", " Apple ", "apple"], ["Apple", "apple", "pear"]),
        (["NA", "null", "None"], ["NA", "None", "null"]),
        (["2", "b", "10"], ["2", "10", "b"]),
    ],
)
def test_classes_have_names_in_a_natural_order(
    tmp_path: Path, labels: list[str], classes: list[str]
) -> None:
    lines = [f"text {number},{label}" for number, label in enumerate(labels)]
    table = read(write(tmp_path / "rows.csv", "\n".join(["text,label", *lines])))
    assert classes_of(table) == classes
    names = [label.strip().removesuffix(".0") for label in labels]
    assert [label for _, label in rows_of(table["train"])] == names


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_whole_numbers_with_gaps_are_classes_in_every_format(tmp_path: Path, suffix: str) -> None:
    frame = pandas.DataFrame({"text": list("abcd"), "label": [70, 3, None, 70]})
    path = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, index=True)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    table = read(path)
    assert classes_of(table) == ["3", "70"]
    assert rows_of(table["train"]) == [("a", "70"), ("b", "3"), ("d", "70")]


def test_splits_in_files_of_their_own_share_the_classes_of_the_training_file(
    tmp_path: Path,
) -> None:
    table = read(
        write(tmp_path / "train.csv", "text,label\na,x\nb,y\n"),
        validation=write(tmp_path / "validation.tsv", "label\ttext\ny\tc\n"),
        test=write(tmp_path / "test.jsonl", '{"text": "d", "label": "x"}\n'),
    )
    assert {split: rows_of(rows) for split, rows in table.items()} == {
        "train": [("a", "x"), ("b", "y")],
        "validation": [("c", "y")],
        "test": [("d", "x")],
    }
    assert table["test"].features == table["train"].features


@pytest.mark.parametrize("split", ["validation", "test"])
def test_labels_that_training_lacks_are_named_or_skipped(tmp_path: Path, split: str) -> None:
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    other = write(tmp_path / "other.csv", "text,label\nc,x\n,\nd,z\ne,w\nf,z\n")
    files: dict[str, Any] = {split: other}
    with pytest.raises(DataError, match=rf"of the {split} split: 'z' \(2\), 'w' \(1\)") as raised:
        read(train, **files)
    assert "'z' in line 4 of" in raised.value.message
    assert "--skip-unknown-labels" in raised.value.remedy
    with pytest.raises(DataError, match=r"'X' \(1\)") as raised:
        read(train, **{split: write(tmp_path / "case.csv", "text,label\nc,X\n")})
    assert "differ in case alone" in raised.value.remedy
    none_known: dict[str, Any] = {split: write(tmp_path / "none.csv", "text,label\nc,z\n")}
    with pytest.raises(DataError, match=r"'z' \(1\)") as raised:
        read(train, skip_unknown_labels=True, **none_known)
    assert "--skip-unknown-labels" not in raised.value.remedy

    emitted: list[Event] = []
    table = read(train, emitted=emitted, skip_unknown_labels=True, **files)
    assert rows_of(table[split]) == [("c", "x")]
    assert f"3 rows of the {split} split skipped: no training row has 'z' (2), 'w' (1)" in (
        warnings_in(emitted)
    )


def test_a_class_that_only_the_file_knows_by_name_is_unknown_without_training_rows(
    tmp_path: Path,
) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["x", "y", "z"])})
    for name, labels in (("train", [0, 1]), ("test", [0, 2])):
        rows = {"text": ["a", "b"], "label": labels}
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"'z' in row 2 of .*test\.parquet"):
        read(tmp_path / "train.parquet", test=tmp_path / "test.parquet")


def test_a_number_is_the_same_class_however_each_file_spells_it(tmp_path: Path) -> None:
    table = read(
        write(tmp_path / "train.csv", "text,label\na,0.20\nb,3\n"),
        test=write(tmp_path / "test.csv", "text,label\nc,0.2\nd,3.0\n"),
    )
    assert classes_of(table) == ["0.2", "3"]
    assert rows_of(table["test"]) == [("c", "0.2"), ("d", "3")]


def test_scores_are_numbers_and_those_of_other_files_too(tmp_path: Path) -> None:
    rows = "".join(f"text {n},{n / 10}\n" for n in range(30))
    train = write(tmp_path / "rows.csv", "text,score\n" + rows)
    table = read(train, label="score", test=write(tmp_path / "test.csv", "text,score\na,-7\nb,\n"))
    assert table["train"]["label"][:3] == [0.0, 0.1, 0.2]
    assert table["test"]["label"][:] == [-7.0]
    for score in ("much", "1e39"):
        other = write(tmp_path / "a.csv", f"text,score\na,{score}\n")
        with pytest.raises(DataError, match=f"the label '{score}' is no number, or too large"):
            read(train, label="score", test=other)


LISTS = [["x"], ["x", "w"], [], ["w", "z"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "names.parquet", "a.csv", "flags.csv"])
def test_several_labels_a_row_are_read_from_lists_words_and_flags(
    tmp_path: Path, name: str
) -> None:
    path, texts = tmp_path / name, list("abcd")
    if name == "names.parquet":
        features = Features({"text": Value("string"), "label": List(ClassLabel(names=[*"xwz"]))})
        content = {"text": texts, "label": [["xwz".index(one) for one in own] for own in LISTS]}
        Dataset.from_dict(content, features=features).to_parquet(path)
    elif name == "flags.csv":
        rows = [
            (text, *(int(one in own) for one in "xwz"))
            for text, own in zip(texts, LISTS, strict=True)
        ]
        pandas.DataFrame(rows, columns=["text", "x", "w", "z"]).to_csv(path, index=False)
    else:
        lists = ["|".join(own) for own in LISTS] if name == "a.csv" else LISTS
        frame = pandas.DataFrame({"text": texts, "label": lists})
        if path.suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            getattr(frame, f"to_{path.suffix[1:]}")(path)
    emitted: list[Event] = []
    rows = read(path, emitted=emitted)["train"]
    messages = " ".join(event.message for event in emitted if isinstance(event, Info))
    assert ("columns of 0 and 1" in messages) == (name == "flags.csv")
    names = rows.features["label"].feature.names
    assert [[names[one] for one in own] for own in rows["label"]] == LISTS
    assert sorted(names) == sorted("xwz")


def test_texts_that_were_decoded_wrongly_are_a_warning(tmp_path: Path) -> None:
    emitted: list[Event] = []
    read(write(tmp_path / "a.csv", "text,label\nà la cafÃ©,x\nÃtre,y\n"), emitted=emitted)
    [message] = warnings_in(emitted)
    assert message.startswith("1 texts")
    assert "cafÃ©" in message


def test_a_column_that_another_file_lacks_is_reported_with_that_file(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "review,label\na,x\nb,y\n")
    other = write(tmp_path / "other.csv", "text,label\nc,x\n")
    with pytest.raises(DataNotFound, match=r"other\.csv has no column 'review'"):
        read(train, test=other)


def test_rows_without_text_or_label_are_left_out_and_counted(tmp_path: Path) -> None:
    emitted: list[Event] = []
    content = 'text,label\na,x\n"over\ntwo lines",y\n" ",x\nc,\nd,y\n'
    table = read(write(tmp_path / "rows.csv", content), emitted=emitted)
    assert rows_of(table["train"]) == [("a", "x"), ("over\ntwo lines", "y"), ("d", "y")]
    [message] = warnings_in(emitted)
    assert message.startswith("2 of 5 rows skipped")
    assert f"line 5 of {tmp_path / 'rows.csv'}" in message


def test_the_columns_are_reported_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "id,review,stars\n1,good,5\n2,bad,1\n3,fair,5\n")
    emitted: list[Event] = []
    read(path, emitted=emitted, text="review")
    assert (
        Info(
            "texts from column 'review' (as --text-column says), labels from 'stars' (its"
            " name says so)"
        )
        in emitted
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("review,label\n,x\n,y\n", "no row .* has a text in 'review' and a label in 'label'"),
        ("text,label\na,\n,y\n", "no row .* has a text in 'text' and a label in 'label'"),
    ],
)
def test_a_training_file_with_nothing_to_learn_is_refused(
    tmp_path: Path, content: str, complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint) as raised:
        read(write(tmp_path / "rows.csv", content))
    assert "-column" in raised.value.remedy


@pytest.mark.parametrize("content", ["text\nc\n", "text,label\nc,\n"])
def test_a_split_without_labels_is_left_out_only_where_that_is_allowed(
    tmp_path: Path, content: str
) -> None:
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    test = write(tmp_path / "test.csv", content)
    emitted: list[Event] = []
    assert list(read(train, test=test, data="hub:acme/rows", emitted=emitted)) == ["train"]
    assert "test split has no labels" in warnings_in(emitted)[0]
    with pytest.raises(DataError, match=r"test\.csv"):
        read(train, test=test)


def test_several_files_make_one_split(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / f"{name}.csv", f"text,label\n{name} 1,x\n{name} 2,y\n") for name in "ab"
    ]
    table = read_tables(
        {"train": parts},
        DataOptions("", ""),
        emit=lambda event: None,
    ).splits
    assert table["train"]["text"][:] == ["a 1", "a 2", "b 1", "b 2"]
