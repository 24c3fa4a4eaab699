"""TREC from its raw files, from the Hub, and from different copies."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hub_server import HubServer, hub_client
from trec_files import TREC_DIR, needs_trec

from finetune.config.schema import DataConfig
from finetune.data.trec import COARSE, FILES, FINE, HUB_REPOSITORY, load_trec
from finetune.errors import DataNotFoundError, DataUnreadableError, HubNotReachableError

# Invented questions in TREC's format, with fine class names that several coarse classes share.
ROWS = [
    ("DESC:manner", "How does one fold a paper boat ?"),
    ("ENTY:other", "What do tailors keep pins in ?"),
    ("LOC:other", "Where do herons sleep ?"),
    ("NUM:other", "Which number does the blue tram have ?"),
    ("DESC:desc", "What is the smell of rain like ?"),
    ("HUM:desc", "Who was the first lighthouse keeper of our bay ?"),
    ("ABBR:abb", "What is the short form of kilogram ?"),
    ("NUM:date", "When does the harbour festival begin ?"),
    ("ENTY:currency", "What do they pay with in Zagreb ?"),
    ("LOC:city", "Which city twinned with Ghent as a sister city ?"),
]


def load(folder: Path | None, *, label: Any = "label-coarse") -> DatasetDict:
    options = DataConfig(label=label, data_dir=str(folder) if folder else None)
    return load_trec(options).splits


def write_raw(folder: Path, *, train: int = len(ROWS), test: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{fine} {text}\n".replace("sister ", "sister\xf0") for fine, text, *_ in ROWS]
    for name, count in ((FILES["train"], train), (FILES["test"], test)):
        if count:
            (folder / name).write_bytes("".join(lines[:count]).encode("iso-8859-1"))
    return folder


def write_parquet(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write rows of fine class and text in the Hub's format, with the classes in another order."""
    features = Features(
        {"text": Value("string"), "fine_label": ClassLabel(names=sorted(FINE, reverse=True))}
    )
    content = {"text": [text for _, text in rows], "fine_label": [fine for fine, _ in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(content, features=features).to_parquet(path)


def test_raw_files_become_texts_and_classes(tmp_path: Path) -> None:
    table = load(write_raw(tmp_path, test=3))
    assert {split: len(rows) for split, rows in table.items()} == {"train": 10, "test": 3}
    assert table["train"].features == Features(
        {"text": Value("string"), "label": ClassLabel(names=list(COARSE))}
    )
    assert table["train"][9] == {"text": ROWS[9][1], "label": COARSE.index("LOC")}


@pytest.mark.parametrize("label", ["label-coarse", "label-fine"])
def test_the_files_of_the_hub_equal_the_raw_files(tmp_path: Path, label: str) -> None:
    for split, count in (("train", 10), ("test", 4)):
        write_parquet(tmp_path / f"hub/default/{split}/0000.parquet", ROWS[:count])
    raw = load(write_raw(tmp_path / "raw", test=4), label=label)
    with (
        HubServer(datasets={HUB_REPOSITORY: tmp_path / "hub"}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        fetched = load(None, label=label)
    for split, rows in raw.items():
        assert (fetched[split].features, fetched[split].to_dict()) == (
            rows.features,
            rows.to_dict(),
        )


def test_without_any_network_the_remedy_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with (
        hub_client(endpoint="http://127.0.0.1:9", home=tmp_path),
        pytest.raises(HubNotReachableError) as raised,
    ):
        load(None)
    assert "--data questions" in raised.value.remedy
    assert "--data-dir" in raised.value.remedy


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataNotFoundError, match=rf"{folder}/train_5500\.label"):
            load(folder)


@pytest.mark.parametrize("line", ["What is this ?", "NUM:date", "NUM:never When ?", "x" * 500])
def test_a_line_that_does_not_parse_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = write_raw(tmp_path, train=2) / "train_5500.label"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataUnreadableError, match=f"line 3 of {path}") as raised:
        load(tmp_path)
    assert repr(line[:50])[1:-1] in raised.value.message
    assert len(raised.value.message) < 200 + len(str(path))


@needs_trec
def test_the_published_training_file_has_the_published_counts() -> None:
    train = load(TREC_DIR)["train"]
    assert len(train) == 5452
    counts = Counter(COARSE[number] for number in train["label"])
    assert counts == {"ABBR": 86, "ENTY": 1250, "DESC": 1162, "HUM": 1223, "LOC": 835, "NUM": 896}
    assert "sister city" in train["text"][65]
