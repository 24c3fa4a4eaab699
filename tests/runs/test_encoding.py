"""Token ids of many texts: in parts, stored, and the same as without a store."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from prepared_runs import prepare_tiny, quick_config, was_emitted

from finetune.events import Event, WarningMessage, sent_to
from finetune.model.load import TextModel
from finetune.model.tensor_store import open_tensor_store
from finetune.runs import encoding
from finetune.runs.preparation import Preparation
from finetune.tokenization.examples import Examples

Encode = Callable[..., Examples]
LONG_TEXTS: list[dict[str, Any]] = [
    {"max_length": 8},
    {"max_length": 8, "long_texts": "windows", "stride": 1},
]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Preparation:
    return prepare_tiny(tiny_folder)


@pytest.fixture
def encode(plain: Preparation, tiny_folder: Path, tmp_path: Path) -> Encode:
    """Return what encodes the training rows, or others, with some options."""

    def encode_rows(rows: Dataset | None = None, **options: Any) -> Examples:
        config = quick_config(tiny_folder, **{"cache_dir": str(tmp_path / "cache")} | options)
        # Each process has a tokenizer of its own.
        text_model = replace(plain.text_model, tokenizer=deepcopy(plain.text_model.tokenizer))
        rows = rows or plain.data.splits["train"]
        return encoding.encode_rows(rows, "train", text_model, config=config)

    return encode_rows


@pytest.fixture
def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take every table for one of many texts; return how many were encoded, call by call."""
    monkeypatch.setattr(encoding, "MANY_TEXTS", 1)
    counts: list[int] = []
    encode = TextModel.encode

    def counted(self: TextModel, texts: Any, *others: Any, **options: Any) -> Any:
        counts.append(len(texts))
        return encode(self, texts, *others, **options)

    monkeypatch.setattr(TextModel, "encode", counted)
    return counts


def assert_same(examples: Examples, expected: Examples) -> None:
    np.testing.assert_array_equal(examples.lengths, expected.lengths)
    assert examples.truncated_texts == expected.truncated_texts
    if expected.windows:
        assert examples.windows
        np.testing.assert_array_equal(examples.windows.counts, expected.windows.counts)
    order = np.random.default_rng(0).permutation(len(expected.lengths))
    longest = int(expected.lengths.max())
    found, wanted = (one.inputs_of(order, longest) for one in (examples, expected))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("options", LONG_TEXTS)
def test_stored_token_ids_are_those_of_the_texts_and_are_used_again(
    options: dict[str, Any], plain: Preparation, encode: Encode, encoded_texts: list[int]
) -> None:
    expected = encode(feature_cache=False, **options)
    for texts_to_encode in (len(plain.data.splits["train"]), 0):
        encoded_texts.clear()
        assert_same(encode(**options), expected)
        assert sum(encoded_texts) == texts_to_encode


def test_what_token_ids_depend_on_is_in_their_key(
    plain: Preparation, encode: Encode, encoded_texts: list[int], tmp_path: Path
) -> None:
    others = plain.data.splits["train"].map(lambda row: {"text": row["text"] + "!"})
    for arguments, options in [((), one) for one in LONG_TEXTS] + [((others,), {})]:
        encoded_texts.clear()
        encode(*arguments, **options)
        assert sum(encoded_texts)
    store = open_tensor_store(quick_config(tmp_path, cache_dir=str(tmp_path / "cache")).cache)
    assert len(store.entries()) == 3


def test_token_ids_stay_in_memory_where_they_can_not_be_stored(
    encode: Encode, encoded_texts: list[int], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    emitted: list[Event] = []
    with sent_to(emitted.append):
        assert_same(encode(), encode(feature_cache=False))
    assert was_emitted(emitted, WarningMessage, "token ids can't be written")
