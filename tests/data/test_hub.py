"""Hub datasets from a local server, and TREC from raw files and from the Hub."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_files import load
from datasets import ClassLabel, Dataset, Features, Value
from hub_server import MAIN_COMMIT, HubServer, hub_client

from finetune.config.schema import DataConfig
from finetune.data.dataset import Splits
from finetune.data.load import CONVERTED_BRANCH
from finetune.data.trec import COARSE, FILES, FINE, HUB_REPOSITORY, load_trec
from finetune.errors import DataError, DataNotFoundError, DataUnreadableError, HubNotReachableError

SET = "acme/rows"
TREC_DIR = Path(os.environ.get("TREC_DIR", Path(__file__).parents[3] / "shared" / "trec"))
CLASSES = ["zebra", "ant"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/README.md").write_text("# Rows")
    return tmp_path / "set"


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    (tmp_path / "converted").mkdir()
    return tmp_path / "converted"


@pytest.fixture
def hub(tmp_path: Path, folder: Path, converted: Path) -> Iterator[HubServer]:
    with (
        HubServer(datasets={SET: folder, f"{SET}@{CONVERTED_BRANCH}": converted}) as server,
        hub_client(endpoint=server.endpoint, home=tmp_path / "home"),
    ):
        yield server


def write_parquet(path: Path, *texts: str, labels: list[int] | None = None) -> None:
    """Write rows with these labels, or with alternating ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    features = Features({"text": Value("string"), "label": ClassLabel(names=CLASSES)})
    numbers = labels or [number % 2 for number in range(len(texts))]
    Dataset.from_dict({"text": list(texts), "label": numbers}, features=features).to_parquet(path)


def write_lines(path: Path, *texts: str) -> None:
    rows = ({"text": text, "label": CLASSES[i % 2]} for i, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts_of(name: str = SET) -> dict[str, list[str]]:
    return {split: [text for text, _ in rows] for split, rows in load(f"hub:{name}").rows.items()}


def test_parquet_files_are_loaded_with_their_class_names(hub: HubServer, folder: Path) -> None:
    write_parquet(folder / "data/train-00000-of-00002.parquet", "a", "b")
    write_parquet(folder / "data/train-00001-of-00002.parquet", "c")
    write_parquet(folder / "data/validation-00000-of-00001.parquet", "d")
    write_parquet(folder / "data/test-00000-of-00001.parquet", "e")
    write_parquet(folder / "data/unsupervised-00000-of-00001.parquet", "f")
    write_lines(folder / "train.jsonl", "other", "rows")
    outcome = load(f"hub:{SET}")
    train = [("a", "zebra"), ("b", "ant"), ("c", "zebra")]
    assert outcome.rows == {
        "train": train,
        "validation": [("d", "zebra")],
        "test": [("e", "zebra")],
    }
    assert outcome.loaded.task.class_names == CLASSES


def test_dataset_with_a_script_is_loaded_from_the_converted_branch(
    hub: HubServer, folder: Path, converted: Path
) -> None:
    (folder / "rows.py").write_text("raise SystemExit('a script was run')")
    write_parquet(converted / "default/train/0000.parquet", "a", "b")
    write_parquet(converted / "default/train/0001.parquet", "c")
    write_parquet(converted / "default/test/0000.parquet", "d")
    assert texts_of() == {"train": ["a", "b", "c"], "test": ["d"]}
    assert "rows.py" not in hub.downloads()


def test_dataset_configuration_is_selected_after_a_colon(hub: HubServer, folder: Path) -> None:
    for part in ("mrpc", "rte"):
        name = f"{part}/train-00000-of-00001.parquet"
        write_parquet(folder / name, f"{part} a", f"{part} b")
    assert texts_of(f"{SET}:rte") == {"train": ["rte a", "rte b"]}
    assert not any("mrpc" in path for path in hub.downloads())
    with pytest.raises(DataError, match="several datasets: mrpc, rte") as raised:
        texts_of()
    assert "hub:OWNER/NAME:mrpc" in raised.value.remedy
    with pytest.raises(DataNotFoundError, match="no dataset 'sst2', but mrpc, rte"):
        texts_of(f"{SET}:sst2")


def test_revision_is_loaded_without_the_converted_branch(
    hub: HubServer, folder: Path, converted: Path
) -> None:
    write_parquet(folder / "train.parquet", "a", "b")
    assert texts_of(f"{SET}@{MAIN_COMMIT}") == {"train": ["a", "b"]}
    with pytest.raises(DataNotFoundError, match="revision"):
        texts_of(f"{SET}@v9")
    (folder / "train.parquet").unlink()
    write_parquet(converted / "default/train/0000.parquet", "c", "d")
    with pytest.raises(DataNotFoundError, match="no complete training split"):
        texts_of(f"{SET}@{MAIN_COMMIT}")


def test_test_split_without_labels_is_skipped(hub: HubServer, folder: Path) -> None:
    write_parquet(folder / "train.parquet", "a", "b")
    write_parquet(folder / "test.parquet", "c", "d", labels=[-1, -1])
    outcome = load(f"hub:{SET}")
    assert list(outcome.rows) == ["train"]
    assert "test split" in outcome.warnings[0]


@pytest.mark.parametrize("is_converted", [True, False])
def test_dataset_is_loaded_from_the_cache_when_offline(
    hub: HubServer, tmp_path: Path, folder: Path, converted: Path, is_converted: bool
) -> None:
    if is_converted:
        write_parquet(converted / "default/train/0000.parquet", "a", "b")
    else:
        write_lines(folder / "train.jsonl", "a", "b")
    online = texts_of()
    for home in (
        hub_client(endpoint="http://127.0.0.1:9", home=tmp_path / "home"),
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home", offline=True),
    ):
        hub.requests.clear()
        with home:
            assert texts_of() == online
        assert hub.requests == []


def test_incomplete_download_is_not_used(
    hub: HubServer, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for number in range(3):
        write_parquet(folder / f"data/train-0000{number}-of-00003.parquet", f"a{number}", "b")
    write_parquet(folder / "data/test-00000-of-00001.parquet", "c")
    hub.failures.cut_after_bytes["train-00001-of-00003.parquet"] = 100
    with pytest.raises(HubNotReachableError):
        texts_of()
    with (
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home", offline=True),
        pytest.raises((HubNotReachableError, DataNotFoundError)),
    ):
        texts_of()


def test_missing_dataset_raises_an_error_with_a_remedy(
    hub: HubServer, tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(DataNotFoundError, match="no complete training split") as raised:
        texts_of()
    assert "script" in raised.value.remedy
    with pytest.raises(DataNotFoundError, match="acme/raws") as raised:
        texts_of("acme/raws")
    assert "spelling" in raised.value.remedy
    with (
        hub_client(endpoint=hub.endpoint, home=tmp_path / "other", offline=True),
        pytest.raises(HubNotReachableError, match="acme/rows"),
    ):
        texts_of()


# Invented questions in TREC format. Several coarse classes share a fine class name.
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


def read_trec(folder: Path | None, *, label: Any = "label-coarse") -> Splits:
    options = DataConfig(label=label, data_dir=str(folder) if folder else None)
    return load_trec(options).splits


def write_raw(folder: Path, *, train: int = len(ROWS), test: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{fine} {text}\n".replace("sister ", "sister\xf0") for fine, text, *_ in ROWS]
    for name, count in ((FILES["train"], train), (FILES["test"], test)):
        if count:
            (folder / name).write_bytes("".join(lines[:count]).encode("iso-8859-1"))
    return folder


def write_trec(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write rows of fine class and text in the Hub format, with a different class order."""
    features = Features(
        {"text": Value("string"), "fine_label": ClassLabel(names=sorted(FINE, reverse=True))}
    )
    content = {"text": [text for _, text in rows], "fine_label": [fine for fine, _ in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(content, features=features).to_parquet(path)


def test_raw_trec_files_become_texts_and_classes(tmp_path: Path) -> None:
    table = read_trec(write_raw(tmp_path, test=3))
    assert {split: len(rows) for split, rows in table.items()} == {"train": 10, "test": 3}
    types = {field.name: str(field.type) for field in table["train"].schema}
    assert types == {"text": "string", "row": "int64", "label": "int64"}
    last = {"text": ROWS[9][1], "row": 10, "label": COARSE.index("LOC")}
    assert table["train"].to_pylist()[9] == last


@pytest.mark.parametrize("label", ["label-coarse", "label-fine"])
def test_hub_files_equal_the_raw_trec_files(tmp_path: Path, label: str) -> None:
    for split, count in (("train", 10), ("test", 4)):
        write_trec(tmp_path / f"hub/default/{split}/0000.parquet", ROWS[:count])
    raw = read_trec(write_raw(tmp_path / "raw", test=4), label=label)
    with (
        HubServer(datasets={HUB_REPOSITORY: tmp_path / "hub"}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        fetched = read_trec(None, label=label)
    for split, rows in raw.items():
        assert fetched[split].equals(rows)


def test_network_error_suggests_bundled_questions_and_data_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with (
        hub_client(endpoint="http://127.0.0.1:9", home=tmp_path),
        pytest.raises(HubNotReachableError) as raised,
    ):
        read_trec(None)
    assert "--data questions" in raised.value.remedy
    assert "--data-dir" in raised.value.remedy


def test_missing_trec_folder_or_file_is_reported(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataNotFoundError, match=rf"{folder}/train_5500\.label"):
            read_trec(folder)


@pytest.mark.parametrize("line", ["What is this ?", "NUM:date", "NUM:never When ?", "x" * 500])
def test_invalid_trec_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = write_raw(tmp_path, train=2) / "train_5500.label"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataUnreadableError, match=f"line 3 of {path}") as raised:
        read_trec(tmp_path)
    assert repr(line[:50])[1:-1] in raised.value.message
    assert len(raised.value.message) < 200 + len(str(path))


@pytest.mark.skipif(
    not (TREC_DIR / "train_5500.label").is_file(),
    reason="needs train_5500.label in the folder TREC_DIR",
)
def test_trec_training_file_has_the_published_class_counts() -> None:
    train = read_trec(TREC_DIR)["train"]
    assert len(train) == 5452
    counts = Counter(COARSE[number] for number in train["label"].to_pylist())
    assert counts == {"ABBR": 86, "ENTY": 1250, "DESC": 1162, "HUM": 1223, "LOC": 835, "NUM": 896}
    assert "sister city" in train["text"][65].as_py()
