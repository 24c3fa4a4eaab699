"""Texts become token ids, once a run."""

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from finetune.events import Advance, Emit, Info, ignore
from finetune.tokenization.long_texts import TRUNCATED, LongTexts
from finetune.tokenization.windows import Windows, head_and_tail

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerFast

    Texts: TypeAlias = Sequence[str] | pyarrow.ChunkedArray

# Texts go to the tokenizer in slices of this size. What it returns, hundreds of bytes a token, then
# stays in the processor's cache: slices of 10,000 take 1.6 times as long (docs/LOG.md).
TEXTS_A_CALL = 512
# Of long texts fewer go at once, so that memory does not grow with them.
CHARACTERS_A_CALL = 2**17
SECONDS_BETWEEN_REPORTS = 5.0
_ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class EncodedTexts:
    """The token ids of many texts, end to end in flat arrays.

    Args:
        columns: For each input of the model, such as ``input_ids``, int32 of shape [all tokens].
        offsets: Where each text begins, and the end of the last: int64 of shape [texts + 1]. Of
            texts that are cut into windows, where each window does.
        padding: For each column the value that stands for "no token".
        truncated_texts: How many have lost tokens.
        windows: Which windows are of which text; None where each text is read at once.
    """

    columns: dict[str, NDArray[np.int32]]
    offsets: NDArray[np.int64]
    padding: dict[str, int]
    pads_left: bool
    truncated_texts: int
    windows: Windows | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each text or window, special ones included: int64 of shape [texts]."""
        return np.diff(self.offsets)

    def to_arrays(self) -> dict[str, NDArray[np.int32]]:
        """Return what of this depends on the texts, for ``with_arrays``: all of one dimension."""
        # A column of one value has one number in memory, and needs no more elsewhere.
        columns = {name: one if any(one.strides) else one[:1] for name, one in self.columns.items()}
        counts = {"window_counts": self.windows.counts} if self.windows else {}
        other = {"lengths": self.lengths, "truncated_texts": np.array([self.truncated_texts])}
        arrays = columns | counts | other
        return {name: np.require(one, np.int32, ["C", "W"]) for name, one in arrays.items()}

    def with_arrays(self, arrays: Mapping[str, NDArray[np.int32]]) -> "EncodedTexts":
        """Return other texts that were encoded as these, from what ``to_arrays`` has returned."""
        offsets = np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)])
        windows = self.windows
        if windows:
            windows = replace(windows, counts=arrays["window_counts"].astype(np.int64))
        return replace(
            self,
            columns={name: np.broadcast_to(arrays[name], offsets[-1]) for name in self.columns},
            offsets=offsets,
            truncated_texts=int(arrays["truncated_texts"][0]),
            windows=windows,
        )

    def count(self, token_id: int | None) -> int:
        """Return how often a token occurs in all texts."""
        return int(np.count_nonzero(self.columns["input_ids"] == token_id))


def encode_texts(
    tokenizer: "PreTrainedTokenizerFast",
    texts: "Texts",
    pairs: "Texts | None" = None,
    *,
    max_length: int,
    long_texts: LongTexts = TRUNCATED,
    emit: Emit = ignore,
) -> EncodedTexts:
    """Turn texts into token ids, each into ``max_length`` at most, special tokens included.

    With ``pairs``, the second text of each example, the longer of the two is truncated first.
    ``long_texts`` says what becomes of single texts with more. Where it takes seconds, ``emit``
    receives how far it has come.
    """
    names = [name for name in tokenizer.model_input_names if name in _ATTRIBUTES]
    # What transformers' own call does, without its conversion of every token's offsets and masks.
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    if long_texts.handling == "head-tail":
        backend.no_truncation()
    elif long_texts.handling == "windows":
        backend.enable_truncation(max_length, stride=long_texts.stride)
    else:
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    found = _Tokens({name: array("i") for name in names}, max_length, long_texts)
    for piece in _pieces(texts, pairs, emit=emit):
        found.add(backend.encode_batch_fast(piece))
    offsets = np.concatenate([[0], np.cumsum(found.lengths, dtype=np.int64)])
    constants = found.constants.items()
    is_cut = long_texts.handling == "windows"
    return EncodedTexts(
        columns={name: np.asarray(column) for name, column in found.columns.items()}
        | {name: np.broadcast_to(np.int32(one), offsets[-1]) for name, one in constants},
        offsets=offsets,
        padding={
            name: tokenizer.pad_token_id if name == "input_ids" else tokenizer.pad_token_type_id
            for name in names
        },
        pads_left=tokenizer.padding_side == "left",
        truncated_texts=found.truncated_texts,
        windows=Windows(np.asarray(found.counts), long_texts.pooling) if is_cut else None,
    )


@dataclass
class _Tokens:
    """What the tokenizer has returned so far, as columns of the model's inputs."""

    columns: "dict[str, array[int]]"
    max_length: int
    long_texts: LongTexts
    constants: dict[str, int] = field(default_factory=dict)
    lengths: "array[int]" = field(default_factory=partial(array, "q"))
    counts: "array[int]" = field(default_factory=partial(array, "q"))
    truncated_texts: int = 0

    def add(self, encodings: Sequence[Encoding]) -> None:
        if not self.lengths:
            self.constants = _constant_columns(encodings, list(self.columns))
        kept: NDArray[np.bool_] | slice = slice(None)
        if self.long_texts.handling == "windows":
            windows = [(one, *one.overflowing) for one in encodings]
            self.counts.extend(map(len, windows))
            encodings = list(chain.from_iterable(windows))
        lengths = np.fromiter(map(len, encodings), np.int64)
        if self.long_texts.handling == "head-tail":
            kept = head_and_tail(lengths, max_length=self.max_length)
            self.truncated_texts += int(np.count_nonzero(lengths > self.max_length))
            lengths = np.minimum(lengths, self.max_length)
        elif self.long_texts.handling == "truncate":
            self.truncated_texts += sum(bool(one.overflowing) for one in encodings)
        self.lengths.frombytes(lengths.tobytes())
        for name, column in self.columns.items():
            if name not in self.constants:
                column.frombytes(_column_of(encodings, name)[kept].tobytes())


def random_texts(
    lengths: NDArray[np.int64], *, vocabulary_size: int, padding_id: int, seed: int
) -> EncodedTexts:
    """Return texts of random tokens, ``lengths`` of each, to be timed or compared on devices."""
    random = np.random.default_rng(seed)
    tokens = random.integers(vocabulary_size, size=lengths.sum(), dtype=np.int32)
    return EncodedTexts(
        columns={"input_ids": tokens},
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        padding={"input_ids": padding_id},
        pads_left=False,
        truncated_texts=0,
    )


def _pieces(
    texts: "Texts", pairs: "Texts | None", *, emit: Emit
) -> Iterator[list[str] | list[tuple[str, str]]]:
    """Yield the texts, or pairs, in slices, and report every few seconds how many are done."""
    started = reported = time.monotonic()
    for start in range(0, len(texts), TEXTS_A_CALL):
        piece = _listed(texts[start : start + TEXTS_A_CALL])
        if pairs is None:
            yield from _few_characters(piece)
        else:
            yield list(zip(piece, _listed(pairs[start : start + TEXTS_A_CALL]), strict=True))
        done, now = start + len(piece), time.monotonic()
        is_end = done == len(texts) and reported > started
        if is_end or now - reported > SECONDS_BETWEEN_REPORTS:
            if reported == started:
                emit(Info(f"encoding {len(texts):,} texts"))
            reported = now
            emit(Advance(done, len(texts)))


def _listed(texts: "Texts") -> list[str]:
    return list(texts) if isinstance(texts, Sequence) else texts.to_pylist()


def _few_characters(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in slices of about ``CHARACTERS_A_CALL``, or of one text."""
    before = np.cumsum([0, *map(len, texts)])[:-1]
    starts = np.flatnonzero(np.diff(before // CHARACTERS_A_CALL)) + 1
    for start, end in pairwise([0, *starts.tolist(), len(texts)]):
        yield texts[start:end]


def _column_of(encodings: Sequence[Encoding], name: str) -> NDArray[np.int32]:
    """Return an input of the model for all tokens of some texts, end to end."""
    values = chain.from_iterable(getattr(one, _ATTRIBUTES[name]) for one in encodings)
    return np.fromiter(values, np.int32)


def _constant_columns(encodings: Sequence[Encoding], names: Sequence[str]) -> dict[str, int]:
    """Return the value of each column that is the same for every token, by the first texts.

    The types of tokens come from the tokenizer's template and not from the words.
    """
    found = {name: np.unique(_column_of(encodings, name)) for name in names if name != "input_ids"}
    return {name: int(values[0]) for name, values in found.items() if len(values) == 1}
