"""Texts become token ids, once a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

# Texts go to the tokenizer in slices of this size: its result holds Python objects for every token,
# about 100 bytes each, which a large table must not hold all at once.
TEXTS_A_CALL = 10_000
_ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class EncodedTexts:
    """The token ids of many texts, end to end in flat arrays.

    Args:
        columns: For each input of the model, such as ``input_ids``, int32 of shape [all tokens].
        offsets: Where each text begins, and the end of the last: int64 of shape [texts + 1].
        padding: For each column the value that stands for "no token".
    """

    columns: dict[str, NDArray[np.int32]]
    offsets: NDArray[np.int64]
    padding: dict[str, int]
    pads_left: bool
    truncated_texts: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each text, special ones included: int64 of shape [texts]."""
        return np.diff(self.offsets)

    def count(self, token_id: int | None) -> int:
        """Return how often a token occurs in all texts."""
        return int(np.count_nonzero(self.columns["input_ids"] == token_id))


def encode_texts(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, max_length: int
) -> EncodedTexts:
    """Turn texts into token ids, each into ``max_length`` at most, special tokens included."""
    names = [name for name in tokenizer.model_input_names if name in _ATTRIBUTES]
    pieces = {name: [np.empty(0, np.int32)] for name in names}
    lengths: list[int] = []
    truncated_texts = 0
    # What transformers' own call does, without its conversion of every token's offsets and masks.
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    for start in range(0, len(texts), TEXTS_A_CALL):
        encodings = backend.encode_batch_fast(list(texts[start : start + TEXTS_A_CALL]))
        lengths += map(len, encodings)
        truncated_texts += sum(bool(encoding.overflowing) for encoding in encodings)
        for name in names:
            ids = chain.from_iterable(getattr(one, _ATTRIBUTES[name]) for one in encodings)
            pieces[name].append(np.fromiter(ids, np.int32))
    return EncodedTexts(
        columns={name: np.concatenate(arrays) for name, arrays in pieces.items()},
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        padding={
            name: tokenizer.pad_token_id if name == "input_ids" else tokenizer.pad_token_type_id
            for name in names
        },
        pads_left=tokenizer.padding_side == "left",
        truncated_texts=truncated_texts,
    )
