"""The encodings that files come in."""

import codecs
import random
from pathlib import Path

import pyarrow
import pytest

from finetune.data.encoding import decode, encode_for_arrow
from finetune.errors import DataUnreadable, UsageError

TEXT = "Grüße aus Zürich – „fünf Straßen“\n"
PATH = Path("greetings.csv")
# ruff: noqa: RUF001
LINES = {
    "gb18030": "这家餐厅的服务非常好，我们会再来的,好评\n今天的天气真糟糕,差评\n",
    "big5": "這家餐廳的服務非常好，我們會再來的,好評\n今天的天氣真糟糕,差評\n",
    "cp932": "この映画はとても面白かったです,良い\n二度と見たくない作品,悪い\n",
    "cp949": "이 영화는 정말 재미있었습니다,좋음\n다시는 가고 싶지 않다,나쁨\n",
    "koi8_r": "Этот фильм мне очень понравился,хорошо\nУжасное обслуживание в гостинице,плохо\n",
    "cp1251": "Этот фильм мне очень понравился,хорошо\nУжасное обслуживание в гостинице,плохо\n",
    "cp1253": "Η ταινία ήταν πολύ καλή,καλό\nΔεν θα ξαναπάμε ποτέ,κακό\n",
    "cp1252": "Die Bedienung war „wirklich“ sehr schön – für uns,gut\nIn Maßen gut,schlecht\n",
    "latin-1": "Le café était délicieux, très bien,bon\nUne soirée décevante à oublier,mauvais\n",
    "mac_roman": "Le café était délicieux, l’été aussi,bon\nÇa va, où êtes-vous ?,mauvais\n",
    "windows-1252": "Hyvää huomenta, elokuva oli pitkä,hyvä\nEi enää koskaan, töykeä,paha\n",
    "utf-16-le": "The film was good,good\nNever again,bad\n",
    "utf-16-be": "The film was good,good\nNever again,bad\n",
}


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (TEXT.encode(), "utf-8"),
        (TEXT.encode("utf-8-sig"), "utf-8-sig"),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), "utf-16"),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "utf-16"),
    ],
    ids=["UTF-8", "UTF-8 with mark", "UTF-16 LE", "UTF-16 BE"],
)
def test_unicode_is_certain(content: bytes, encoding: str) -> None:
    assert decode(content, path=PATH, encoding=None) == (TEXT, encoding, ())


@pytest.mark.parametrize("codec", LINES)
def test_the_encodings_of_the_world_are_detected(codec: str) -> None:
    text = "text,label\n" + LINES[codec] * 20
    decoded = decode(text.encode(codec), path=PATH, encoding=None)
    assert decoded.text == text
    assert codecs.lookup(decoded.encoding).name != "utf-8"


def test_an_encoding_that_is_not_certain_has_rivals() -> None:
    swedish = "text,label\n" + "Maten var väldigt god på restaurangen,bra\n" * 20
    decoded = decode(swedish.encode("cp1252"), path=PATH, encoding=None)
    assert decoded == (swedish, "cp1252", decoded.rivals)
    assert "cp1250" in decoded.rivals
    assert "cp1252" not in decoded.rivals
    assert "latin_1" not in decoded.rivals
    euros = decode("Größe 5 €,gut\n".encode("cp1252") * 20, path=PATH, encoding=None)
    assert euros.encoding == "cp1252"
    assert "latin_1" not in euros.rivals  # there the euro sign is a control character


def test_letters_far_from_the_beginning_of_a_large_file_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetune.data.encoding.SAMPLE_BYTES", 1000)
    text = "text,label\n" + "plain English,a\n" * 200 + LINES["cp932"] * 40
    assert decode(text.encode("cp932"), path=PATH, encoding=None).text == text


def test_an_encoding_that_is_named_is_taken() -> None:
    content = LINES["koi8_r"].encode("koi8_r")
    assert decode(content, path=PATH, encoding="koi8_r").text == LINES["koi8_r"]
    with pytest.raises(UsageError, match="'koi9'"):
        decode(content, path=PATH, encoding="koi9")
    with pytest.raises(UsageError, match="'undefined'"):
        decode(content, path=PATH, encoding="undefined")
    with pytest.raises(DataUnreadable, match=r"line 1 of greetings\.csv .* ASCII") as raised:
        decode(content, path=PATH, encoding="ascii")
    assert "--encoding" in raised.value.remedy


def test_plain_english_is_utf8() -> None:
    assert decode(b"text,label\n", path=PATH, encoding=None).encoding == "utf-8"


def test_utf8_that_is_damaged_in_one_place_is_reported_with_its_line() -> None:
    content = f"{TEXT}{TEXT}caf".encode() + b"\xe9 and more\n" + TEXT.encode()
    with pytest.raises(DataUnreadable, match=r"line 3 of greetings\.csv .* UTF-8"):
        decode(content, path=PATH, encoding=None)


def test_half_a_character_of_utf16_is_an_error() -> None:
    with pytest.raises(DataUnreadable, match="UTF-16"):
        decode(codecs.BOM_UTF16_LE + b"a\0b", path=PATH, encoding=None)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04\x00\x00\xff\x01", random.Random(0).randbytes(3000)]
)
def test_bytes_that_are_no_text_are_refused(content: bytes) -> None:
    with pytest.raises(DataUnreadable, match="not a text file") as raised:
        decode(content, path=PATH, encoding=None)
    assert "UTF-8" in raised.value.remedy


def test_a_nul_in_a_text_is_reported_with_its_line() -> None:
    with pytest.raises(DataUnreadable, match="line 3 has the character NUL"):
        decode(f"text,label\n{TEXT}a\0b,x\n".encode(), path=PATH, encoding=None)


def test_as_many_damaged_letters_as_whole_ones_are_no_damaged_utf8() -> None:
    assert decode(b"\xc3\xa9 caf\xe9", path=PATH, encoding=None).encoding != "utf-8"


def test_what_arrows_threads_release_does_not_need_pythons_lock() -> None:
    before = pyarrow.total_allocated_bytes()
    encoded = encode_for_arrow(text := "Käse, 😀\n" * 1000)
    assert encoded.to_pybytes().decode() == text
    assert pyarrow.total_allocated_bytes() - before >= encoded.size  # Python's bytes don't count
