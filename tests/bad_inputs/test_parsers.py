"""Parsers of any bytes return a result or raise a ``FinetuneError``, never a different exception.

The environment variable ``FUZZED_FILES=20000`` tries more files.
"""

import csv
import gzip
import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from finetune.config.load import load_config
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.data.stream import read_texts
from finetune.errors import FinetuneError
from finetune.evaluation.prediction_file import PredictionFile
from finetune.tasks.base import Prediction

FILES = int(os.environ.get("FUZZED_FILES", "40"))
DELIMITED = ["text,label\n", "a b,x\n", "c d;y\n", '"', "'", '""', ",", ";", "\t", "|", "\r", "\n"]
JSON = ['{"text": "a b", "label": "x"}\n', '{"text": ', '"label"', "{}", "[", "]", "}", ":", "1e9"]
RAW = ["NUM:date When ?\n", "DESC:def What is it ?\r\n", "LOC:", "NUM:date", "\xf0", "\x85"]
YAML = ["training:\n", "  seed: 1\n", "data: {", "}", "- ", "? ", "&a ", "*a", "!!int ", "|\n", "'"]
SPECIAL_CHARACTERS = [
    "\0",
    "\ufeff",
    "\u2028",
    "\x1b",
    "\x85",
    " ",
    "é",
    "😀",
    "\\ud800",
    "nan",
    "-1",
    "9" * 400,
]


def _parquet_bytes() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["a b", "c d"], "label": ["x", "y"]}), file)
    return file.getvalue()


def _archive(members: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def contents(pieces: list[str]) -> st.SearchStrategy[bytes]:
    """Bytes that look like a file format, in some encoding, with random bytes inserted."""
    texts = st.lists(st.sampled_from([*pieces, *pieces, *SPECIAL_CHARACTERS]), max_size=30).map(
        "".join
    )
    encoded = st.builds(
        lambda text, codec: text.encode(codec, errors="replace"),
        texts,
        st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252", "gb18030"]),
    )
    parts = st.lists(st.one_of(encoded, encoded, st.binary(max_size=20)), max_size=4)
    return parts.map(b"".join)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes of a file, with some bytes changed or the end missing."""
    content = bytearray(whole)
    places = st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255))
    for place, byte in draw(st.lists(places, max_size=6)):
        content[place] = byte
    return bytes(content[: draw(st.just(len(whole)) | st.integers(0, len(whole)))])


def read_table(path: Path) -> None:
    load_data(DataConfig(str(path)))


def stream_table(path: Path) -> None:
    for _ in read_texts(path, DataConfig(str(path)), as_lines=False):
        pass


def read_trec(path: Path) -> None:
    path.rename(path.with_name("train_5500.label"))
    load_data(DataConfig("trec", label="label-fine", data_dir=str(path.parent)))


def read_config(path: Path) -> None:
    load_config(file=str(path), environment={}, flags={}, assignments=())


CASES = {
    "rows.csv": (contents(DELIMITED), read_table),
    "rows.jsonl": (contents(JSON), read_table),
    "rows.parquet": (damaged(_parquet_bytes()), read_table),
    "rows.csv.gz": (damaged(gzip.compress("".join(DELIMITED[:2]).encode())), read_table),
    "rows.csv.zip": (damaged(_archive({"rows.csv": b"text,label\na b,x\nc d,y\n"})), read_table),
    "texts.jsonl": (contents(JSON), stream_table),
    "texts.txt": (contents(DELIMITED), stream_table),
    "raw.label": (contents(RAW), read_trec),
    "mine.yaml": (contents(YAML), read_config),
}


@pytest.mark.parametrize("name", CASES)
def test_any_bytes_are_read_or_rejected(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strategy, read = CASES[name]

    @settings(max_examples=FILES, suppress_health_check=list(HealthCheck))
    @given(content=strategy)
    def check(content: bytes) -> None:
        path = tmp_path_factory.mktemp("fuzz") / name
        path.write_bytes(content)
        with suppress(FinetuneError):
            read(path)

    check()


@settings(max_examples=FILES, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), min_size=1)] * 2), min_size=1
    )
)
def test_predictions_survive_a_csv_round_trip(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("answers") / "answers.csv"
    answers = PredictionFile(path, source=None)
    answers.add([Prediction(text, {"label": label, "probability": 0.5}) for text, label in rows])
    answers.write()
    with path.open(encoding="utf-8", newline="") as file:
        assert [(row["text"], row["label"]) for row in csv.DictReader(file)] == rows
