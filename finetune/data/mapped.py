"""Large tables: in a file without a name that is mapped, so that memory does not hold them."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from tempfile import TemporaryFile

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import ipc

from finetune import hub
from finetune.errors import DataError

LARGE_BYTES = 2**25
# So many that what is made of a piece takes little memory.
PIECE_ROWS = 2**14


def collect(pieces: Iterable[pyarrow.Table]) -> pyarrow.Table:
    """Return one table of one or more pieces, which are asked for one by one.

    A large one goes to a file without a name in the cache, which is mapped and ends with the table.
    """
    pieces = iter(pieces)
    first: list[pyarrow.Table] = []
    size_bytes = 0
    for piece in pieces:
        first.append(piece)
        size_bytes += piece.nbytes
        if size_bytes > LARGE_BYTES:
            break
    else:
        return pyarrow.concat_tables(first)
    folder = hub.cache_folder("tables")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            with ipc.new_file(file, first[0].schema) as writer:
                for piece in chain(first, pieces):
                    writer.write_table(piece)
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(
            f"a large table can't be written to {folder}: {error}",
            remedy="make room, or name a folder on another disk as HF_ASSETS_CACHE",
        ) from error
    return ipc.open_file(pyarrow.py_buffer(content)).read_all()


def map_pieces(
    table: pyarrow.Table, convert: Callable[[pyarrow.Table], pyarrow.Table]
) -> pyarrow.Table:
    """Return a table that is converted piece by piece."""
    return collect(map(convert, pieces_of(table)))


def filter_rows(table: pyarrow.Table, mask: NDArray[np.bool_]) -> pyarrow.Table:
    """Return the rows for which the mask, of shape [rows], is true."""
    if mask.all():
        return table
    masks = (mask[start : start + PIECE_ROWS] for start in range(0, len(mask), PIECE_ROWS))
    pieces = zip(pieces_of(table), masks, strict=True)
    return collect(piece.filter(pyarrow.array(own)) for piece, own in pieces)


def pieces_of(table: pyarrow.Table) -> Iterator[pyarrow.Table]:
    """Yield a table in pieces."""
    for start in range(0, len(table) or 1, PIECE_ROWS):
        yield table.slice(start, PIECE_ROWS)
