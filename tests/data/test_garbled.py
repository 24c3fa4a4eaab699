"""Texts that were decoded as another encoding than UTF-8."""

# ruff: noqa: RUF001

import pytest

from finetune.data.tables import is_garbled


@pytest.mark.parametrize(
    ("text", "page"),
    [("café", "cp1252"), ("it’s", "cp1251"), ("Привет мир", "cp1251"), ("żółw", "cp1250"),
     ("été", "mac_roman"), ("naïve “word”", "cp437"), ("слово", "latin_1"), ("größer", "cp850")],
)  # fmt: skip
def test_utf_8_read_as_another_encoding_is_noticed(text: str, page: str) -> None:
    assert is_garbled(text.encode().decode(page))


@pytest.mark.parametrize(
    "text",
    ["l’école", "Viel Spaß…", "CAFÉ…", "ФІНІШ КІНІ", "С\u00a0уважением", "сам том рок", "ŁÓDŹ",
     "PŘÍLIŠ ŽLUŤOUČKÝ", "Καλημέρα", "İstanbul", "今天天气", "مرحبا", "Señor ¿qué?", "Ђорђе", "🙂"],
)  # fmt: skip
def test_texts_of_any_language_are_not_taken_for_garbled(text: str) -> None:
    assert not is_garbled(text)
