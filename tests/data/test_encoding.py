"""The encodings that files come in."""

import codecs
from pathlib import Path

import pytest

from finetune.data.encoding import decode
from finetune.errors import DataUnreadable

TEXT = "Grüße aus Zürich – „fünf Straßen“\n"
PATH = Path("greetings.csv")


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (TEXT.encode(), "UTF-8"),
        (TEXT.encode("utf-8-sig"), "UTF-8 with a byte-order mark"),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), "UTF-16"),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "UTF-16"),
        (TEXT.encode("cp1252"), "Windows-1252"),
    ],
)
def test_every_encoding_gives_the_same_text(content: bytes, encoding: str) -> None:
    assert decode(content, path=PATH) == (TEXT, encoding)


def test_bytes_without_a_meaning_in_windows_1252_are_read_as_iso_8859_1() -> None:
    assert decode(b"caf\xe9 \x81", path=PATH) == ("café \x81", "ISO-8859-1")


def test_plain_english_is_utf8() -> None:
    assert decode(b"text,label\n", path=PATH).encoding == "UTF-8"


def test_utf8_that_is_damaged_in_one_place_is_told_with_its_line() -> None:
    content = f"{TEXT}{TEXT}caf".encode() + b"\xe9 and more\n" + TEXT.encode()
    with pytest.raises(DataUnreadable, match=r"line 3 of greetings\.csv .* UTF-8"):
        decode(content, path=PATH)


def test_half_a_character_of_utf16_is_told() -> None:
    with pytest.raises(DataUnreadable, match="UTF-16"):
        decode(codecs.BOM_UTF16_LE + b"a\0b", path=PATH)


@pytest.mark.parametrize("content", [b"PK\x03\x04\x00\x00", TEXT.encode("utf-16-le")])
def test_bytes_that_are_no_text_are_refused(content: bytes) -> None:
    with pytest.raises(DataUnreadable, match="zero bytes") as raised:
        decode(content, path=PATH)
    assert "UTF-8" in raised.value.remedy
