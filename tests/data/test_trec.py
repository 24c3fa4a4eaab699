"""TREC from its raw files, from the Hub in both of its versions, and from copies that differ."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hub_server import HubServer, hub_client
from pyarrow import parquet

from finetune.data import trec
from finetune.data.trec import COARSE, FINE, HUB_REPOSITORY, PUBLISHED, PublishedFile, load_trec
from finetune.errors import (
    ChecksumDiffers,
    DataNotFound,
    DataUnreadable,
    HubNotReachable,
    UsageError,
)
from finetune.events import Event, Stage, WarningMessage

TREC_DIR = Path(
    os.environ.get("TREC_DIR", Path(__file__).parent.parent.parent.parent / "shared" / "trec")
)
needs_trec = pytest.mark.skipif(
    not (TREC_DIR / "train_5500.label").is_file(),
    reason="needs TREC's train_5500.label in the folder TREC_DIR",
)

# Questions in TREC's format, made up here; fine names that several coarse ones share are among
# them. The numbers are those of the Hub's first version: coarse, fine.
ROWS = [
    ("DESC:manner", "How does one fold a paper boat ?", 0, 0),
    ("ENTY:other", "What do tailors keep pins in ?", 1, 14),
    ("LOC:other", "Where do herons sleep ?", 5, 14),
    ("NUM:other", "Which number does the blue tram have ?", 4, 14),
    ("DESC:desc", "What is the smell of rain like ?", 0, 12),
    ("HUM:desc", "Who was the first lighthouse keeper of our bay ?", 3, 12),
    ("ABBR:abb", "What is the short form of kilogram ?", 2, 34),
    ("NUM:date", "When does the harbour festival begin ?", 4, 8),
    ("ENTY:currency", "What do they pay with in Zagreb ?", 1, 46),
    ("LOC:city", "Which city twinned with Ghent as a sister city ?", 5, 21),
]
FIRST_VERSION = ("label-coarse", "label-fine")
PRESENT_VERSION = ("coarse_label", "fine_label")


def no_tell(event: Event) -> None:
    """Leave it untold."""


def write_raw(folder: Path, *, train: int = len(ROWS), test: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{fine} {text}\n".replace("sister ", "sister\xf0") for fine, text, *_ in ROWS]
    for name, count in ((PUBLISHED["train"].name, train), (PUBLISHED["test"].name, test)):
        if count:
            (folder / name).write_bytes("".join(lines[:count]).encode("iso-8859-1"))
    return folder


def write_parquet(
    path: Path,
    rows: list[tuple[str, str]],
    *,
    columns: tuple[str, str],
    names: tuple[list[str], list[str]],
) -> None:
    """Write rows of fine class and text as the Hub's files are, with these names of classes."""
    coarse_names, fine_names = names
    features = Features(
        {
            "text": Value("string"),
            columns[0]: ClassLabel(names=coarse_names),
            columns[1]: ClassLabel(names=fine_names),
        }
    )
    has_long_names = ":" in fine_names[0]
    content = {
        "text": [text for _, text in rows],
        columns[0]: [fine.split(":")[0] for fine, _ in rows],
        columns[1]: [fine if has_long_names else fine.split(":")[1] for fine, _ in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(content, features=features).to_parquet(path)


def load_from_hub(folder: Path, home: Path, *, label: str) -> DatasetDict:
    with (
        HubServer(datasets={HUB_REPOSITORY: folder}) as hub,
        hub_client(endpoint=hub.endpoint, home=home),
    ):
        return load_trec(folder=None, label=label, emit=no_tell)


def contents(table: DatasetDict) -> dict[str, object]:
    return {split: (rows.features, rows.to_dict()) for split, rows in table.items()}


def warning_about(folder: Path) -> str:
    emitted: list[Event] = []
    load_trec(folder=folder, label="label-coarse", emit=emitted.append)
    [warning] = [event for event in emitted if isinstance(event, WarningMessage)]
    return warning.message


def test_raw_files_become_texts_and_classes(tmp_path: Path) -> None:
    table = load_trec(folder=write_raw(tmp_path, test=3), label="label-coarse", emit=no_tell)
    assert {split: len(rows) for split, rows in table.items()} == {"train": 10, "test": 3}
    assert table["train"].features == Features(
        {"text": Value("string"), "label": ClassLabel(names=list(COARSE))}
    )
    assert table["train"][9] == {"text": ROWS[9][1], "label": COARSE.index("LOC")}


def test_the_fine_label_has_fifty_classes(tmp_path: Path) -> None:
    table = load_trec(folder=write_raw(tmp_path), label="label-fine", emit=no_tell)
    label = table["train"].features["label"]
    assert label.names == list(FINE)
    assert len(FINE) == 50
    assert [label.int2str(number) for number in table["train"]["label"]] == [row[0] for row in ROWS]


def test_an_unknown_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="coarse") as raised:
        load_trec(folder=write_raw(tmp_path), label="coarse", emit=no_tell)
    assert "label-coarse" in raised.value.remedy


def test_without_its_test_file_there_is_no_test_split(tmp_path: Path) -> None:
    assert list(load_trec(folder=write_raw(tmp_path), label="label-fine", emit=no_tell)) == [
        "train"
    ]


@pytest.mark.parametrize("label", ["label-coarse", "label-fine"])
@pytest.mark.parametrize("columns", [FIRST_VERSION, PRESENT_VERSION])
def test_both_versions_of_the_hub_equal_the_raw_files(
    tmp_path: Path, columns: tuple[str, str], label: str
) -> None:
    fine_names = sorted({row[0] for row in ROWS}, reverse=True)
    if columns == FIRST_VERSION:
        fine_names = sorted({name.split(":")[1] for name in fine_names}, reverse=True)
    # An order of its own, so that only the names in the file can lead to the right classes.
    names = (sorted(COARSE, reverse=True), fine_names)
    for split, count in (("train", 10), ("test", 4)):
        rows = [row[:2] for row in ROWS[:count]]
        path = tmp_path / f"hub/default/{split}/0000.parquet"
        write_parquet(path, rows, columns=columns, names=names)
    raw = load_trec(folder=write_raw(tmp_path / "raw", test=4), label=label, emit=no_tell)
    assert contents(load_from_hub(tmp_path / "hub", tmp_path / "home", label=label)) == contents(
        raw
    )


@pytest.mark.parametrize("columns", [FIRST_VERSION, PRESENT_VERSION])
def test_without_names_in_the_file_the_columns_tell_the_order(
    tmp_path: Path, columns: tuple[str, str]
) -> None:
    is_first = columns == FIRST_VERSION
    rows = [
        {
            "text": text,
            columns[0]: first_coarse if is_first else COARSE.index(fine.split(":")[0]),
            columns[1]: first_fine if is_first else FINE.index(fine),
        }
        for fine, text, first_coarse, first_fine in ROWS
    ]
    for split in ("train", "test"):
        path = tmp_path / f"hub/default/{split}/0000.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    raw = load_trec(folder=write_raw(tmp_path / "raw", test=10), label="label-fine", emit=no_tell)
    loaded = load_from_hub(tmp_path / "hub", tmp_path / "home", label="label-fine")
    assert contents(loaded) == contents(raw)


def test_a_table_with_other_columns_is_told_as_unreadable(tmp_path: Path) -> None:
    for split in ("train", "test"):
        path = tmp_path / f"hub/default/{split}/0000.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.table({"sentence": ["a"], "y": [0]}), path)
    with pytest.raises(DataUnreadable, match="sentence, y"):
        load_from_hub(tmp_path / "hub", tmp_path / "home", label="label-coarse")


def test_a_hub_without_trec_leads_to_the_original_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write_raw(tmp_path / "raw", test=4)
    published = {
        split: PublishedFile(
            file.name, hashlib.sha256((raw / file.name).read_bytes()).hexdigest(), file.class_counts
        )
        for split, file in PUBLISHED.items()
    }
    monkeypatch.setattr(trec, "PUBLISHED", published)
    emitted: list[Event] = []
    with (
        HubServer(models={"the/original": raw}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        address = f"{hub.endpoint}/the/original/resolve/main"
        monkeypatch.setattr(trec, "ORIGINAL_ADDRESS", address)
        table = load_trec(folder=None, label="label-coarse", emit=emitted.append)

        hub.failures.down = True
        again = load_trec(folder=None, label="label-coarse", emit=no_tell)
    assert contents(table) == contents(again)
    assert contents(table) == contents(load_trec(folder=raw, label="label-coarse", emit=no_tell))
    assert any(isinstance(event, Stage) and address in event.message for event in emitted)


def test_damage_on_the_way_is_not_hidden_by_the_other_address(tmp_path: Path) -> None:
    names = (list(COARSE), list(FINE))
    for split in ("train", "test"):
        path = tmp_path / f"hub/default/{split}/0000.parquet"
        write_parquet(path, [row[:2] for row in ROWS], columns=PRESENT_VERSION, names=names)
    with (
        HubServer(datasets={HUB_REPOSITORY: tmp_path / "hub"}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        hub.failures.altered.add("0000.parquet")
        with pytest.raises(ChecksumDiffers):
            load_trec(folder=None, label="label-coarse", emit=no_tell)


def test_without_any_network_the_remedy_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trec, "ORIGINAL_ADDRESS", "http://127.0.0.1:9")
    with (
        hub_client(endpoint="http://127.0.0.1:9", home=tmp_path),
        pytest.raises(HubNotReachable) as raised,
    ):
        load_trec(folder=None, label="label-coarse", emit=no_tell)
    assert "--data questions" in raised.value.remedy
    assert "--data-dir" in raised.value.remedy


def test_a_missing_folder_or_file_is_told_with_its_name(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataNotFound, match=rf"{folder}/train_5500\.label"):
            load_trec(folder=folder, label="label-coarse", emit=no_tell)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_questions_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train_5500.label").write_bytes(content)
    with pytest.raises(DataUnreadable, match="holds no questions"):
        load_trec(folder=tmp_path, label="label-coarse", emit=no_tell)


@pytest.mark.parametrize(
    "line", ["What is this ?", "NUM:date", "NUM:never When ?", "x" * 500, "\x00\x01"]
)
def test_a_line_that_does_not_parse_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    path = write_raw(tmp_path, train=2) / "train_5500.label"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataUnreadable, match=f"line 3 of {path}") as raised:
        load_trec(folder=tmp_path, label="label-coarse", emit=no_tell)
    assert repr(line[:50])[1:-1] in raised.value.message
    assert len(raised.value.message) < 200 + len(str(path))


def test_a_shortened_copy_is_used_with_a_warning_that_counts(tmp_path: Path) -> None:
    message = warning_about(write_raw(tmp_path))
    assert "10 questions, not 5452" in message
    assert "2 of LOC, not 835" in message


def test_a_copy_without_spaces_before_question_marks_is_told_as_such(tmp_path: Path) -> None:
    path = write_raw(tmp_path) / "train_5500.label"
    path.write_bytes(path.read_bytes().replace(b" ?", b"?"))
    assert "no space stands before the question marks" in warning_about(tmp_path)


@pytest.mark.parametrize(
    ("difference", "alter"),
    [
        ("byte-order mark", lambda text: ("\ufeff" + text).encode()),
        ("UTF-8", lambda text: text.encode()),
        ("Windows", lambda text: text.replace("\n", "\r\n").encode("iso-8859-1")),
    ],
)
def test_a_copy_written_otherwise_is_decoded_and_told(
    tmp_path: Path, difference: str, alter: Callable[[str], bytes]
) -> None:
    path = write_raw(tmp_path / "raw") / "train_5500.label"
    original = load_trec(folder=path.parent, label="label-coarse", emit=no_tell)
    path.write_bytes(alter(path.read_bytes().decode("iso-8859-1")))
    assert difference in warning_about(path.parent)
    altered = load_trec(folder=path.parent, label="label-coarse", emit=no_tell)
    assert contents(altered) == contents(original)


@needs_trec
def test_the_published_training_file_has_the_published_counts() -> None:
    emitted: list[Event] = []
    train = load_trec(folder=TREC_DIR, label="label-coarse", emit=emitted.append)["train"]
    assert len(train) == 5452
    counts = Counter(COARSE[number] for number in train["label"])
    assert counts == {"ABBR": 86, "ENTY": 1250, "DESC": 1162, "HUM": 1223, "LOC": 835, "NUM": 896}
    assert "sister city" in train["text"][65]
    assert not any(isinstance(event, WarningMessage) for event in emitted)


@needs_trec
def test_the_fine_classes_are_those_of_the_training_file() -> None:
    train = load_trec(folder=TREC_DIR, label="label-fine", emit=no_tell)["train"]
    assert set(train["label"]) == set(range(50))


@needs_trec
def test_a_real_copy_that_is_merely_written_otherwise_has_the_same_questions(
    tmp_path: Path,
) -> None:
    content = (TREC_DIR / "train_5500.label").read_bytes()
    text = content.decode("iso-8859-1").replace("\n", "\r\n")
    (tmp_path / "train_5500.label").write_bytes(b"\xef\xbb\xbf" + text.encode())
    message = warning_about(tmp_path)
    assert message.endswith("the questions are the same")
    (tmp_path / "train_5500.label").write_bytes(content.replace(b"Popeye", b"Popaye"))
    assert "worded" in warning_about(tmp_path)


@needs_trec
@pytest.mark.parametrize("columns", [FIRST_VERSION, PRESENT_VERSION])
def test_the_real_training_file_is_the_same_from_the_hub(
    tmp_path: Path, columns: tuple[str, str]
) -> None:
    raw = load_trec(folder=TREC_DIR, label="label-fine", emit=no_tell)["train"]
    rows = [(FINE[number], text) for number, text in zip(raw["label"], raw["text"], strict=True)]
    names = (list(COARSE), list(FINE))
    if columns == FIRST_VERSION:
        # It numbered the classes as they come up in this file.
        coarse_and_fine = [fine.split(":") for fine, _ in rows]
        names = (
            list(dict.fromkeys(coarse for coarse, _ in coarse_and_fine)),
            list(dict.fromkeys(fine for _, fine in coarse_and_fine)),
        )
    for split in ("train", "test"):
        path = tmp_path / f"hub/default/{split}/0000.parquet"
        write_parquet(path, rows, columns=columns, names=names)
        if columns == FIRST_VERSION:
            parquet.write_table(parquet.read_table(path).replace_schema_metadata(None), path)
    hub = load_from_hub(tmp_path / "hub", tmp_path / "home", label="label-fine")["train"]
    assert hub.features == raw.features
    assert hub.to_dict() == raw.to_dict()
