"""The encodings of files."""

import codecs
import random
from pathlib import Path

import pytest

from finetune.data.encoding import TextFile, find_text
from finetune.data.packed import Content
from finetune.errors import DataUnreadableError, UsageError
from finetune.events import Event, WarningMessage, sent_to

TEXT = "Grüße aus Zürich – „fünf Straßen“\n"
PATH = Path("greetings.csv")
# ruff: noqa: RUF001
LINES = {
    "cp932": "この映画はとても面白かったです,良い\n二度と見たくない作品,悪い\n",
    "koi8_r": "Этот фильм мне очень понравился,хорошо\nУжасное обслуживание в гостинице,плохо\n",
}


def find(content: bytes, *, encoding: str | None = None) -> TextFile:
    return find_text(Content(PATH, content), encoding=encoding)


def text_of(file: TextFile) -> str:
    return file.open().read()


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (TEXT.encode(), "utf-8"),
        (TEXT.encode("utf-8-sig"), "utf-8-sig"),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), "utf-16"),
    ],
    ids=["UTF-8", "UTF-8 with mark", "UTF-16"],
)
def test_unicode_is_certain(content: bytes, encoding: str) -> None:
    found = find(content)
    assert (text_of(found), found.encoding) == (TEXT, encoding)


def test_a_detected_encoding_is_a_warning_unless_it_is_named() -> None:
    swedish = "text,label\n" + "Maten var väldigt god på restaurangen,bra\n" * 20
    emitted: list[Event] = []
    for encoding in (None, "cp1252"):
        with sent_to(emitted.append):
            found = find(swedish.encode("cp1252"), encoding=encoding)
        assert (text_of(found), found.encoding) == (swedish, "cp1252")
    [warning] = emitted
    assert isinstance(warning, WarningMessage)
    assert "detected as cp1252" in warning.message


def test_an_encoding_that_is_named_is_taken() -> None:
    content = LINES["koi8_r"].encode("koi8_r")
    assert text_of(find(content, encoding="koi8_r")) == LINES["koi8_r"]
    with pytest.raises(UsageError, match="'koi9'"):
        find(content, encoding="koi9")
    with pytest.raises(DataUnreadableError, match=r"line 1 of greetings\.csv .* ASCII") as raised:
        find(content, encoding="ascii")
    assert "--encoding" in raised.value.remedy


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (b"caf\xe9 and", "line 42 of .* is not UTF-8: "),
        (b"a\0b", "not a text file: it has the character NUL"),
        (b"cut \xf0\x9f", "line 42 of .* unexpected end of data"),
    ],
)
def test_damage_behind_the_first_piece_of_a_file_is_reported_with_its_place(
    damage: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.encoding.CHUNK_BYTES", 64)
    with pytest.raises(DataUnreadableError, match=complaint):
        find("é, a word or two 😀\n".encode() * 41 + damage)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04\x00\x00\xff\x01", random.Random(0).randbytes(3000)]
)
def test_bytes_that_are_no_text_are_refused(content: bytes) -> None:
    with pytest.raises(DataUnreadableError, match=r"line 1 of greetings\.csv is not UTF-8"):
        find(content)
