"""Which rows repeat the text of another: for splits without leaks, and for what is odd in them."""

import numpy as np
import pyarrow
from numpy.typing import NDArray


def normal_form(text: str) -> str:
    r"""Return what texts share that count as the same: they differ in case and spaces only.

    >>> normal_form("What is\tTHE  sun ? ")
    'what is the sun ?'
    """
    return " ".join(text.casefold().split())


def number_texts(texts: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    """Return the number of each text, from 0 in order of appearance; the same texts share one."""
    # Arrow has no case folding.
    normal = pyarrow.array(map(normal_form, texts.to_pylist()), "string")
    numbers: NDArray[np.int64] = normal.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers
