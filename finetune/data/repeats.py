"""Which rows repeat the text of another: for splits without leaks, and for what is odd in them."""

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray


def normal_form(text: str) -> str:
    r"""Return what texts share that count as the same: they differ in case and spaces only.

    >>> normal_form("What is\tTHE  sun ? ")
    'what is the sun ?'
    """
    return " ".join(text.casefold().split())


def number_texts(texts: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    """Return the number of each text, from 0 in order of appearance; the same texts share one."""
    trimmed = pc.utf8_trim_whitespace(pc.ascii_lower(texts))
    normal = pc.binary_join(pc.utf8_split_whitespace(trimmed), " ").combine_chunks()
    # Arrow has no case folding for other letters than those of ASCII.
    is_other = pc.invert(pc.string_is_ascii(texts)).combine_chunks()
    others = pyarrow.array(map(normal_form, texts.filter(is_other).to_pylist()), "string")
    normal = pc.replace_with_mask(normal, is_other, others)
    numbers: NDArray[np.int64] = normal.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers
