"""Tokenizes texts, once per run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationError
from finetune.events import Advance, emit

if TYPE_CHECKING:
    import pyarrow
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    Texts: TypeAlias = Sequence[str] | pyarrow.ChunkedArray

# Texts go to the tokenizer in slices of this size, whose output fits into the processor cache.
TEXTS_PER_CALL = 512
# Fewer long texts go to the tokenizer at a time, to limit memory.
CHARACTERS_PER_CALL = 2**17
SECONDS_BETWEEN_REPORTS = 5.0
_ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class Windows:
    """Maps windows to texts. The logits of a text are the mean logits of its windows.

    ``counts`` contains the number of windows per text, at least 1: int64 of shape [texts]. The
    windows of a text are consecutive, in text order.
    """

    counts: NDArray[np.int64]

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """First window of each text: int64 of shape [texts]."""
        return np.cumsum(self.counts) - self.counts

    def of(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows of these texts, text by text: int64 of shape [windows]."""
        counts = self.counts[texts]
        ends = np.cumsum(counts)
        return np.repeat(self.firsts[texts] - (ends - counts), counts) + np.arange(counts.sum())

    def average(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Average window logits to text logits: [texts, classes]."""
        sums = np.add.reduceat(logits, self.firsts, dtype=np.float64)
        return (sums / self.counts[:, None]).astype(np.float32)


@dataclass(frozen=True)
class EncodedTexts:
    """The token IDs of many texts, concatenated in flat arrays.

    Args:
        columns: For each model input, such as ``input_ids``, int32 of shape [all tokens].
        offsets: The start of each text or window, and the end of the last: int64 of shape
            [texts + 1].
        padding: The padding value of each column.
        truncated_texts: The number of truncated texts.
        windows: Maps windows to texts, or None if no text has windows.
    """

    columns: dict[str, NDArray[np.int32]]
    offsets: NDArray[np.int64]
    padding: dict[str, int]
    pads_left: bool
    truncated_texts: int
    windows: Windows | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per text or window, including special tokens: int64 of shape [texts]."""
        return np.diff(self.offsets)

    def count(self, token_id: int | None) -> int:
        """Count the occurrences of a token ID."""
        return int(np.count_nonzero(self.columns["input_ids"] == token_id))

    def take(self, texts: NDArray[np.int64]) -> "EncodedTexts":
        """Return these texts, in this order. None may be truncated or have windows."""
        tokens = Windows(self.lengths).of(texts)
        columns = {name: column[tokens] for name, column in self.columns.items()}
        offsets = np.cumsum(np.concatenate([[0], self.lengths[texts]]))
        return replace(self, columns=columns, offsets=offsets)

    def padded(
        self, texts: NDArray[np.int64], *, padded_length: int
    ) -> dict[str, NDArray[np.int64] | NDArray[np.bool_]]:
        """Pad the texts at these indices to a length, or to the longest if that is longer.

        Each column becomes int64 of shape [texts, tokens]. Also return an ``attention_mask``,
        bool.
        """
        starts = self.offsets[texts]
        lengths = self.offsets[texts + 1] - starts
        positions = np.arange(padded_length)
        first = (padded_length - lengths if self.pads_left else np.zeros_like(lengths))[:, None]
        mask = (positions >= first) & (positions < first + lengths[:, None])
        sources = (starts[:, None] + positions - first)[mask]
        arrays: dict[str, NDArray[np.int64] | NDArray[np.bool_]] = {"attention_mask": mask}
        for name, tokens in self.columns.items():
            arrays[name] = np.full(mask.shape, self.padding[name], np.int64)
            arrays[name][mask] = tokens[sources]
        return arrays


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer of the `tokenizers` library, and how a model reads its output.

    ``padding`` contains the padding value of each model input except the attention mask.
    """

    backend: "tokenizers.Tokenizer"
    padding: Mapping[str, int]
    pads_left: bool
    truncates_left: bool

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast") -> "TextEncoder":
        """Create the encoder of a transformers tokenizer."""
        ids = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        return cls(
            tokenizer.backend_tokenizer,
            {name: ids[name] for name in tokenizer.model_input_names if name in ids},
            tokenizer.padding_side == "left",
            tokenizer.truncation_side == "left",
        )


def encode_texts(
    tokenizer: "PreTrainedTokenizerFast | TextEncoder",
    texts: "Texts",
    pairs: "Texts | None" = None,
    *,
    max_length: int,
    stride: int | None = None,
) -> EncodedTexts:
    """Tokenize each text to at most ``max_length`` token IDs, including special tokens.

    ``pairs`` contains the second text of each example. The longer of the two is truncated first.
    With a ``stride``, a longer single text becomes windows that overlap by this many tokens.
    """
    encoder = tokenizer if isinstance(tokenizer, TextEncoder) else TextEncoder.of(tokenizer)
    _set_truncation(encoder, stride, max_length=max_length, has_pairs=pairs is not None)
    backend, names = encoder.backend, encoder.padding
    columns = {name: [np.empty(0, np.int32)] for name in names}
    constants: set[str] = set()
    lengths, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    truncated_texts = 0
    for number, piece in enumerate(_pieces(texts, pairs)):
        encodings = backend.encode_batch_fast(piece)
        if stride is None:
            truncated_texts += sum(bool(encoding.overflowing) for encoding in encodings)
        else:
            windows = [(encoding, *encoding.overflowing) for encoding in encodings]
            counts.append(np.fromiter(map(len, windows), np.int64))
            encodings = list(chain.from_iterable(windows))
        lengths.append(np.fromiter(map(len, encodings), np.int64))
        for name in set(names) - constants:
            ids = chain.from_iterable(getattr(part, _ATTRIBUTES[name]) for part in encodings)
            column = np.fromiter(ids, np.int32)
            # Token types come from the tokenizer's template, not from the words.
            if number == 0 and name != "input_ids" and len(np.unique(column)) == 1:
                constants.add(name)
            columns[name].append(column)
    offsets = np.cumsum(np.concatenate([[0], *lengths]))
    joined = {name: np.concatenate(pieces) for name, pieces in columns.items()}
    joined |= {name: np.broadcast_to(joined[name][:1], offsets[-1]) for name in constants}
    return EncodedTexts(
        joined,
        offsets,
        padding={**encoder.padding},
        pads_left=encoder.pads_left,
        truncated_texts=truncated_texts,
        windows=None if stride is None else Windows(np.concatenate(counts)),
    )


def random_texts(
    lengths: NDArray[np.int64], *, vocabulary_size: int, padding_id: int, seed: int
) -> EncodedTexts:
    """Generate texts of random tokens with these lengths."""
    random = np.random.default_rng(seed)
    return EncodedTexts(
        columns={"input_ids": random.integers(vocabulary_size, size=lengths.sum(), dtype=np.int32)},
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        padding={"input_ids": padding_id},
        pads_left=False,
        truncated_texts=0,
    )


def _set_truncation(
    encoder: TextEncoder, stride: int | None, *, max_length: int, has_pairs: bool
) -> None:
    # tokenizers 0.23 sets wrong token types in all windows of a pair except the first.
    if has_pairs and stride is not None:
        raise ConfigurationError(
            "--long-texts windows can't be used with sentence pairs",
            remedy="drop it: the longer text of a pair is truncated first",
        )
    # The same as calling the tokenizer, without converting the offsets and masks of all tokens.
    backend = encoder.backend
    backend.no_padding()
    if stride is None:
        side = "left" if encoder.truncates_left else "right"
        backend.enable_truncation(max_length, direction=side)
        return
    text_tokens = max_length - backend.num_special_tokens_to_add(is_pair=False)
    if stride >= text_tokens:
        raise ConfigurationError(
            f"--stride {stride} is too large: a window contains {text_tokens} tokens of text",
            remedy="lower --stride or raise --max-length",
        )
    backend.enable_truncation(max_length, stride=stride)


def _pieces(texts: "Texts", pairs: "Texts | None") -> Iterator[list[Any]]:
    """Yield the texts, or pairs, in slices, and report every few seconds how many are done."""
    reported = time.monotonic()
    for start in range(0, len(texts), TEXTS_PER_CALL):
        piece: list[Any] = _as_list(texts[start : start + TEXTS_PER_CALL])
        # About CHARACTERS_PER_CALL at once, or one text.
        before = np.cumsum([0, *map(len, piece)])[:-1]
        starts = np.flatnonzero(np.diff(before // CHARACTERS_PER_CALL)) + 1
        if pairs is not None:
            piece = list(zip(piece, _as_list(pairs[start : start + TEXTS_PER_CALL]), strict=True))
        for first, end in pairwise([0, *starts.tolist(), len(piece)]):
            yield piece[first:end]
        if (now := time.monotonic()) - reported > SECONDS_BETWEEN_REPORTS:
            reported = now
            emit(Advance(start + len(piece), len(texts)))


def _as_list(texts: "Texts") -> list[str]:
    return list(texts) if isinstance(texts, Sequence) else texts.to_pylist()
