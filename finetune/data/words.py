"""Words and patterns by which columns, splits, encodings and files are known: words.toml."""

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

CONTENT = files("finetune.data").joinpath("words.toml").read_text("utf-8")
WORDS: dict[str, Any] = tomllib.loads(CONTENT)


def _split_of(groups: Iterable[dict[str, str]]) -> dict[str, str]:
    return {word: name for group in groups for name in group for word in group[name].split()}


# By words in the names of files, and by those in the values of a column.
SPLIT_BY_WORD = _split_of([WORDS["splits"]])
SPLIT_BY_VALUE = _split_of([WORDS["splits"], WORDS["splits_in_columns"]])
