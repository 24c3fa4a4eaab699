"""From a data source to its splits, unlabeled texts and class descriptions."""

import gc
import gzip
import hashlib
import io
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_files import load, write
from pyarrow import parquet
from tiny_models import tiny_tokenizer

from finetune.config.schema import DataConfig, ModelConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import KnownTokens, TextColumns
from finetune.data.load import load_rows, load_splits, with_few_label_texts
from finetune.data.stream import read_lines, read_texts
from finetune.errors import DataError, DataNotFoundError, DataUnreadableError, UsageError
from finetune.events import Event, sent_to
from finetune.tasks.single import Single
from finetune.tokenization.encode import encode_texts


def test_file_is_loaded_with_its_test_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.csv", "text,label\nyes,1\nno,0\n")
    second = write(tmp_path / "b.csv", "text,label\nno way,0\n")
    outcome = load(first, test_file=str(second), text_column="text", label_column="label")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)]
    assert [source.name for source in outcome.loaded.sources] == [str(first), str(second)]
    assert [source.sha256 for source in outcome.loaded.sources] == digests
    assert outcome.rows == {"train": [("yes", "1"), ("no", "0")], "test": [("no way", "0")]}
    with pytest.raises(UsageError, match="two splits"):
        load(first, test_file=str(tmp_path / "." / "a.csv"))


@pytest.mark.parametrize(
    ("source", "options", "flag"),
    [
        ("questions", {"data_dir": "trec"}, "--data-dir"),
        ("trec", {"encoding": "cp1252"}, "--encoding"),
        ("rows.csv", {"data_dir": "trec"}, "--data-dir"),
        ("hub:acme/rows", {"validation_file": "dev.csv"}, "--validation-file"),
        ("hub:acme/rows", {"label": "label-fine"}, "--label"),
    ],
)
def test_option_that_does_not_apply_to_the_data_is_rejected(
    source: str, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError, match=f"{source} can't be used with {flag}") as raised:
        load(source, **options)
    assert "drop it" in raised.value.remedy


def test_file_name_that_is_not_utf8_is_rejected() -> None:
    for name, options in (("caf\udce9.csv", {}), ("trec", {"data_dir": "caf\udce9"}), ("a\0", {})):
        with pytest.raises(UsageError, match="is not UTF-8"):
            load(name, **options)


def test_new_data_uses_the_class_numbers_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\nyes,b\nno,a\n")
    options = OtherData(str(path), test_file="other.csv")
    rows = load_rows(options, task=Single(["c", "b", "a"]))
    assert rows["label"].to_pylist() == [1, 2]
    classes = [str(number) for number in range(500)]
    with pytest.raises(DataError, match="the model was not trained on: a, b") as raised:
        load_rows(options, task=Single(classes))
    assert raised.value.remedy.endswith("18, 19 and 480 others")


LABELED = [f"question {number},{'ab'[number % 2]}" for number in range(40)]


def load_unlabeled(tmp_path: Path, *lines: str, **options: Any) -> list[str] | None:
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["text,label", *LABELED, *lines]))
    config = DataConfig(str(table), **options)
    unlabeled = with_few_label_texts(load_splits(config), config).unlabeled
    return None if unlabeled is None else sorted(unlabeled["text"].to_pylist())


def test_unlabeled_rows_are_deduplicated_and_absent_from_splits(tmp_path: Path) -> None:
    lines = ("what is new,", "what is new,", "question 7,", '"  ",')
    assert load_unlabeled(tmp_path, *lines) == ["what is new"]
    assert load_unlabeled(tmp_path, *lines, unlabeled="none") is None
    assert load_unlabeled(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("new.txt", "one\n\ntwo\nquestion 7\n"),
        ("new.csv", "id,text\n1,one\n2,two\n3,\n4,question 7\n"),
        ("new.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": null}\n{"text": "question 7"}\n'),
    ],
)
def test_unlabeled_file_is_read_with_all_its_texts(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    texts = load_unlabeled(tmp_path, "not this one,", unlabeled=str(file))
    assert texts == ["one", "question 7", "two"]


def describe(tmp_path: Path, name: str, content: str, **options: Any) -> dict[str, str]:
    rows = [f"question {number},{('card_fee', 'top-up')[number % 2]}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / name).write_text(content)
    config = DataConfig(
        str(tmp_path / "rows.csv"), class_descriptions=str(tmp_path / name), **options
    )
    loaded = with_few_label_texts(load_splits(config), config)
    assert loaded.names is not None
    assert loaded.sources[-1].sha256
    classes = [loaded.task.class_names[number] for number in loaded.names["label"].to_pylist()]
    return dict(zip(classes, loaded.names["text"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "class,description\ncard_fee,\"a fee, charged\"\ntop-up,money added\n"),
        ("b.csv", "top-up, money added\ncard_fee,\"a fee, charged\"\n"),
        ("c.tsv", "n\ttext\tcategory\n1\tmoney added\ttop-up\n2\ta fee, charged\tcard_fee\n"),
        ("d.jsonl", '{"about": "a fee, charged", "id": "card_fee"}\n'
                    '{"about": "money added", "id": "top-up"}\n'),
    ],
)  # fmt: skip
def test_class_descriptions_are_read_from_any_table(
    tmp_path: Path, name: str, content: str
) -> None:
    expected = {"card_fee": "a fee, charged", "top-up": "money added"}
    assert describe(tmp_path, name, content) == expected


def test_class_without_a_description_keeps_its_name(tmp_path: Path) -> None:
    events: list[Event] = []
    with sent_to(events.append):
        described = describe(tmp_path, "a.csv", "top-up,money added\ncard_fee,\n")
    assert described == {"card_fee": "card fee", "top-up": "money added"}
    assert "without a description, described by their name: card_fee" in str(events)


@pytest.mark.parametrize("content", ["topup,money added\ncard_fee,a fee\n", "good,bad\nup,down\n"])
def test_invalid_class_descriptions_are_rejected(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="should contain a class and its description") as raised:
        describe(tmp_path, "a.csv", content)
    assert "the classes are card_fee, top-up" in raised.value.remedy


def texts_in(path: Path, *, as_lines: bool = False, **options: str | None) -> list[str | None]:
    given = DataConfig(str(path), **options)
    pieces = read_texts(path, given, as_lines=as_lines)
    return [text for piece in pieces for text in piece[:].texts]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("rows.csv", "text,id\n" + "one,1\n" * 5000 + "two\n", "line 5002"),
        ("rows.jsonl", '{"text": "one"}\n{"text": \n', "line 2"),
        ("rows.parquet", "PAR1text", "not Parquet"),
        ("rows.jsonl", "é\n" * 100_000 + "\xff\n", "line 1"),
        ("rows.txt", "é\n" * 400_000 + "\xff\n", "line 400001 of "),
    ],
)
def test_invalid_file_is_rejected_before_its_first_row(
    name: str, content: str, word: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content.replace("é", "Ã©").encode("latin-1"))
    with pytest.raises((DataUnreadableError, DataNotFoundError), match=word):
        texts_in(path)


def test_memory_is_independent_of_the_number_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"

    def peak_bytes(lines: int) -> int:
        path.write_text("a text with some words and more words\n" * lines)
        tracemalloc.start()
        pieces = read_texts(path, DataConfig(str(path)), as_lines=False)
        assert sum(map(len, pieces)) == lines
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(1)  # imports too
    assert peak_bytes(80_000) < 1.2 * peak_bytes(40_000)


def test_bytes_and_objects_are_not_read_as_texts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"more": {"a": "a long text"}, "said": "cut \ud83d here"}' + "\n{}\n")
    assert texts_in(path) == ["cut � here", ""]
    parquet.write_table(pyarrow.table({"text": [b"bytes"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataNotFoundError, match="looks like texts"):
        texts_in(tmp_path / "rows.parquet")


def test_txt_file_with_the_columns_of_a_run_is_read_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("Nr\tAntwort\n1\tsehr gut\n2\tna ja\n")
    options = OtherData(str(path), earlier_columns={"text_column": "Antwort"})
    [texts] = read_texts(path, options, as_lines=False)
    assert texts[:].texts == ["sehr gut", "na ja"]
    assert texts_in(path)[0] == "Nr\tAntwort"
    path = path.with_suffix(".csv")
    path.write_text("Grüße\n", encoding="cp1252")
    assert texts_in(path, as_lines=True) == ["Grüße"]


def test_gzipped_lines_are_decompressed(tmp_path: Path) -> None:
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress("schön\n\nfein\n".encode()))
    assert texts_in(tmp_path / "rows.txt.gz") == ["schön", "", "fein"]


class Pipe(io.BytesIO):
    """A pipe that returns a few bytes at a time."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__()
        self.chunks = [*chunks, b""]

    def read1(self, size: int | None = -1) -> bytes:
        return self.chunks.pop(0)


def test_lines_are_yielded_as_soon_as_they_are_complete() -> None:
    pieces = read_lines(Pipe(b"one\ntw", b"o\n\xc3", b"\xa4\n\nend"), name="x", encoding=None)
    assert [piece.texts for piece in pieces] == [["one"], ["two"], ["ä", ""], ["end"]]


def test_line_in_a_different_encoding_is_reported() -> None:
    pieces = read_lines(Pipe(b"one\ntwo\n", b"three\ncaf\xe9\n"), name="x", encoding=None)
    assert next(pieces).texts == ["one", "two"]
    with pytest.raises(DataUnreadableError, match="line 4 of x"):
        next(pieces)


def test_token_ids_are_reused_for_equal_texts_and_options() -> None:
    tokenizer, texts = tiny_tokenizer(), pyarrow.chunked_array([["the city", "the", "a river"]])
    known = KnownTokens("tiny", texts, encode_texts(tokenizer, texts, max_length=99))
    longest = int(known.encoded.lengths.max())
    options = ModelConfig("tiny", max_length=longest)
    found = known.find(TextColumns(texts.take([2, 1, 0])), options)
    assert found is not None
    assert found.lengths.tolist() == known.encoded.lengths[::-1].tolist()
    unlike: list[tuple[TextColumns, dict[str, Any]]] = [
        (TextColumns(pyarrow.chunked_array([["the", "new"]])), {}),
        (TextColumns(texts, texts), {}),
        (TextColumns(texts), {"model": "minilm"}),
        (TextColumns(texts), {"revision": "main"}),
        (TextColumns(texts), {"long_texts": "windows"}),
        (TextColumns(texts), {"max_length": longest - 1}),
    ]
    assert not any(known.find(other, replace(options, **changed)) for other, changed in unlike)


@pytest.mark.parametrize("name", ["rows.csv", "rows"])
def test_only_used_columns_are_kept_in_memory(tmp_path: Path, name: str) -> None:
    lines = [
        f"{number} {'long ' * 20},{'ab'[number % 2]},{'other ' * 40}" for number in range(2000)
    ]
    parts = [lines] if name.endswith(".csv") else [lines[:1000], lines[1000:]]
    for number, part in enumerate(parts):
        file = tmp_path / name if len(parts) == 1 else tmp_path / name / f"train-{number}.csv"
        write(file, "\n".join(["text,label,note", *part]))
    before = pyarrow.total_allocated_bytes()
    columns = {"text_column": "text", "label_column": "label"}
    loaded = load_splits(DataConfig(str(tmp_path / name), **columns))
    gc.collect()
    kept_bytes = pyarrow.total_allocated_bytes() - before
    assert kept_bytes < 1.5 * sum(table.nbytes for table in loaded.splits.values())
