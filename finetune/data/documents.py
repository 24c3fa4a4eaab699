"""JSON and YAML that is one value, whatever its shape, or several values in a row."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import yaml

from finetune.config.schema import DataConfig
from finetune.data.columns import LABEL_NAMES, TEXT_NAMES, plain_name
from finetune.data.delimited import name_values
from finetune.data.json_lines import open_text, without_half_characters
from finetune.data.packed import Content, choose_member
from finetune.data.reader import Reader, Row, as_text
from finetune.errors import DataUnreadable
from finetune.events import Emit

NAMES = {*TEXT_NAMES, *LABEL_NAMES}
# Fields with several texts of one class, in the files of chat bots.
EXAMPLES = ("examples", "patterns", "utterances", "texts", "sentences", "phrases")
# How Rasa marks a word in an example: [Berlin](city), [Berlin]{"entity": "city"}.
ENTITY = re.compile(r"\[([^\]]*)\](\([^)]*\)|\{[^}]*\})")
SHAPES = (
    'write a list of objects, such as [{"text": "Good.", "label": "praise"}]; a configuration is'
    " named by --config"
)


def is_document(content: Content) -> bool:
    """Return whether a file of JSON is something else than one object on each of several lines."""
    with content.open() as file:
        filled = (line for line in map(bytes.strip, file) if line)
        first, second = next(filled, b""), next(filled, b"")
    if not second and content.suffix == ".jsonl":
        with suppress(ValueError, RecursionError):
            return not isinstance(json.loads(first), dict)
    return not (second and first.startswith(b"{") and first.endswith(b"}"))


def rows(
    parse: Callable[[str], Any], content: Content, options: DataConfig, emit: Emit
) -> Iterator[Row]:
    """Yield the rows of the only table in a document, or of the chosen one."""
    text = open_text(content, options, emit)
    try:
        tables = dict(_find_tables(parse("".join(text.pieces()))))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise DataUnreadable(
            f"{text.path} can't be read: {' '.join(str(error).split())}",
            remedy="correct it there, or export it again",
        ) from error
    if not tables:
        raise DataUnreadable(f"{text.path} holds no rows", remedy=SHAPES)
    table = tables[choose_member(list(tables), options.member, path=text.path)]
    if isinstance(table[0], dict):
        yield from enumerate((row for item in table for row in _rows_of(item)), start=1)
        return
    numbered = [
        (number, [as_text(one) or "" for one in row]) for number, row in enumerate(table, 1)
    ]
    if len({len(row) for _, row in numbered}) > 1:
        raise DataUnreadable(f"the arrays of {text.path} have several lengths", remedy=SHAPES)
    yield from name_values(iter(numbered), options, path=text.path, emit=emit)


def parse_json(text: str) -> Any:
    """Return the value of JSON, or a list of several values, with or without commas between."""
    decoder, values, end = json.JSONDecoder(), [], 0
    text = text.strip()
    while end < len(text):
        value, end = decoder.raw_decode(text, end)
        values.append(value)
        while end < len(text) and text[end] in ", \t\r\n":
            end += 1
    return without_half_characters(values[0] if len(values) == 1 else values, text)


def parse_yaml(text: str) -> Any:
    """Return the value of YAML, whose words are all texts; aliases, which multiply, are refused."""
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=loader)):
        raise ValueError("it has aliases")
    values = list(yaml.load_all(text, Loader=loader))
    return values[0] if len(values) == 1 else values


def _find_tables(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield lists of objects, or of arrays, by the keys under which they are."""
    if isinstance(value, list):
        if value and {*map(type, value)} in ({dict}, {list}):
            yield name, value
        elif value and all(isinstance(one, str) for one in value):
            yield name, [{"text": one} for one in value]
    elif isinstance(value, dict) and value:
        table = _rows_by_key(value)
        if table and not (name and table == [value]):
            yield name, table
            return
        prefix = f"{name}." if name else ""
        tables = [one for key, own in value.items() for one in _find_tables(own, f"{prefix}{key}")]
        # Beside intents there are synonyms and patterns.
        complete = [one for one in tables if _is_complete(one[1])]
        yield from complete if len(complete) == 1 else tables


def _is_complete(table: list[Any]) -> bool:
    names = {plain_name(str(name)) for name in table[0]} if isinstance(table[0], dict) else set()
    return bool(names & {*TEXT_NAMES, *EXAMPLES} and names & set(LABEL_NAMES))


def _rows_by_key(value: dict[str, Any]) -> list[Any]:
    """Return the rows of an object that is a table by itself, by what its keys are."""
    inner = list(value.values())
    first, kinds = inner[0], {*map(type, inner)}
    is_named = not NAMES.isdisjoint(map(plain_name, value))
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    if kinds == {dict}:
        # pandas: {"text": {"0": ...}, "label": {"0": ...}}, or {"0": {"text": ...}, ...}.
        if any(own.keys() != first.keys() or _is_nested(own.values()) for own in inner):
            return []
        if is_named:
            return [{name: own[key] for name, own in value.items()} for key in first]
        if not first.keys().isdisjoint(EXAMPLES):
            return [{"label": key, **own} for key, own in value.items()]
        is_like_rows = not NAMES.isdisjoint(map(plain_name, first)) or len(inner) > len(first)
        return inner if is_like_rows else []
    if kinds == {list}:
        if len(value) > 1 and is_named and len(set(map(len, inner))) == 1:
            return [dict(zip(value, row, strict=True)) for row in zip(*inner, strict=True)]
        pairs = [(text, label) for label, texts in value.items() for text in texts]
        is_of_texts = all(isinstance(text, str) for text, _ in pairs)
        return [{"text": text, "label": label} for text, label in pairs] if is_of_texts else []
    if kinds == {str} and len(inner) > 10 and 2 * len(set(inner)) <= len(inner):
        return [{"text": text, "label": label} for text, label in value.items()]
    # One row alone, such as a text to classify.
    return [] if _is_nested(inner) else [value]


def _is_nested(values: Iterable[Any]) -> bool:
    """Return whether there are objects, or lists of these or of lists, among values."""
    return any(
        isinstance(one, dict) or (isinstance(one, list) and {*map(type, one[:1])} & {dict, list})
        for one in values
    )


def _rows_of(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object or, where it has a class and several examples of it, a row for each."""
    for name in EXAMPLES:
        texts = item.get(name)
        if isinstance(texts, list):
            texts = [one.get("text") if isinstance(one, dict) else one for one in texts]
        elif isinstance(texts, str) and texts.startswith("- "):  # as Rasa writes them in YAML
            texts = re.split(r"^- *", texts, flags=re.MULTILINE)[1:] if "intent" in item else []
        else:
            continue
        if all(isinstance(text, str) for text in texts) and len(item) > 1:
            others = {key: own for key, own in item.items() if not isinstance(own, list | dict)}
            for text in texts:
                yield {**others, name: ENTITY.sub(r"\1", text.strip())}
            return
    yield dict(item)


JSON = Reader((".json",), partial(rows, parse_json), unit="row", start=rb"\[")
YAML = Reader((".yml", ".yaml"), partial(rows, parse_yaml), unit="row")
