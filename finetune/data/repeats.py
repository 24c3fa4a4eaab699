"""Which rows repeat the text of another: texts that differ in case and spaces only are the same."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.data.mapped import pieces_of

DIGEST_BYTES = 8


def number_texts(
    texts: pyarrow.ChunkedArray, pairs: pyarrow.ChunkedArray | None = None
) -> NDArray[np.int64]:
    """Return the number of each text, from 0 in order of appearance; the same texts share one.

    With ``pairs``, the second text of each row, both must be the same.
    """
    numbers = _number(texts)
    if pairs is None:
        return numbers
    return _number_values(pyarrow.array(numbers * len(numbers) + _number(pairs)))


def number_splits(
    splits: Mapping[str, Sequence[pyarrow.ChunkedArray]],
) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the texts, or pairs, of each split: the same texts share one in all."""
    columns = zip(*splits.values(), strict=True)
    numbers = number_texts(
        *(pyarrow.chunked_array([chunk for one in own for chunk in one.chunks]) for own in columns)
    )
    ends = np.cumsum([len(own[0]) for own in splits.values()])[:-1]
    return dict(zip(splits, np.split(numbers, ends), strict=True))


def _number(texts: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    table = pyarrow.table({"texts": texts})
    digests = b"".join(_digest(piece["texts"]) for piece in pieces_of(table))
    return _number_values(pyarrow.array(np.frombuffer(digests, np.int64)))


def _digest(texts: pyarrow.ChunkedArray) -> bytes:
    """Return digests of the texts' normal forms, end to end, so that memory holds no more.

    Two other texts share one in a table of 100 M with a chance of 3 in 10,000: they would stay in
    one split.
    """
    normal = pc.ascii_lower(pc.ascii_trim_whitespace(texts)).combine_chunks()
    # Arrow folds no case but that of ASCII, and is slow to join what it has split at spaces.
    has_gaps = pc.match_substring_regex(texts, "[[:cntrl:]]|  ")
    is_other = pc.or_(has_gaps, pc.invert(pc.string_is_ascii(texts))).combine_chunks()
    others = (" ".join(one.casefold().split()) for one in texts.filter(is_other).to_pylist())
    forms = pc.replace_with_mask(normal, is_other, pyarrow.array(others, "string"))
    return b"".join(
        blake2b(form, digest_size=DIGEST_BYTES).digest()
        for form in forms.cast("binary").to_pylist()
    )


def _number_values(values: pyarrow.Array) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = values.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers
