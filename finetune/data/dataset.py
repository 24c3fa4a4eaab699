"""A data set as every source gives it: a ``Dataset`` with the columns text, text_pair and label."""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, Value
from datasets.fingerprint import generate_random_fingerprint
from datasets.table import InMemoryTable
from numpy.typing import NDArray

from finetune.data.mapped import filter_rows
from finetune.devices import host
from finetune.tasks.base import Task


class TextColumns(NamedTuple):
    """The texts of rows, and the second texts where the rows have pairs."""

    texts: pyarrow.ChunkedArray
    pairs: pyarrow.ChunkedArray | None

    @property
    def columns(self) -> list[pyarrow.ChunkedArray]:
        """The one column, or both."""
        return [self.texts] if self.pairs is None else [self.texts, self.pairs]

    @property
    def joined(self) -> pyarrow.ChunkedArray:
        """The texts, and the pairs with a bar between their texts, to be shown or counted."""
        if self.pairs is None:
            return self.texts
        return pc.binary_join_element_wise(self.texts, self.pairs, " | ")

    def slice(self, start: int, end: int) -> "TextColumns":
        """Return those of the rows from one to before another."""
        texts, *pairs = (column.slice(start, end - start) for column in self.columns)
        return TextColumns(texts, pairs[0] if pairs else None)

    def take(self, rows: NDArray[np.int64]) -> "TextColumns":
        """Return those of some rows."""
        texts, *pairs = (column.take(pyarrow.array(rows)) for column in self.columns)
        return TextColumns(texts, pairs[0] if pairs else None)


def make_dataset(texts: Any, labels: Any, *, task: Task, pairs: Any = None) -> Dataset:
    """Return rows with the columns ``text`` and ``label`` and, of pairs, ``text_pair``.

    Texts and labels, the latter as the task parses them, are Arrow arrays or sequences of strings.
    """
    columns = {"text": texts} if pairs is None else {"text": texts, "text_pair": pairs}
    features = Features({**dict.fromkeys(columns, Value("string")), "label": task.feature})
    arrays = [*map(_strings, columns.values()), task.encode(_strings(labels))]
    rows = pyarrow.table(arrays, schema=features.arrow_schema)
    return _dataset_of(rows, DatasetInfo(features=features))


def _strings(values: Any) -> Any:
    is_arrow = isinstance(values, pyarrow.Array | pyarrow.ChunkedArray)
    return values if is_arrow else pyarrow.array(values, "string")


def _dataset_of(rows: pyarrow.Table, info: DatasetInfo) -> Dataset:
    # Without a fingerprint, which serves the cache of map() alone, all rows would be pickled.
    return Dataset(InMemoryTable(rows), info=info, fingerprint=generate_random_fingerprint())


def rows_where(table: Dataset, mask: NDArray[np.bool_]) -> Dataset:
    """Return the rows for which a mask of shape [rows] is true."""
    # select() would keep all rows and look each one up by its number, whenever it is read.
    return _dataset_of(filter_rows(table.with_format("arrow")[:], mask), table.info)


def column_of(table: Dataset, name: str) -> pyarrow.ChunkedArray:
    """Return a column as Arrow."""
    return table.with_format("arrow", columns=[name])[:][name]


def texts_of(table: Dataset) -> TextColumns:
    """Return the texts of rows, or their pairs."""
    pairs = column_of(table, "text_pair") if "text_pair" in table.column_names else None
    return TextColumns(column_of(table, "text"), pairs)


def update_with_texts(digest: "hashlib._Hash", column: pyarrow.ChunkedArray) -> None:
    """Add the lengths of texts and their bytes to a digest, however they are cut into chunks."""
    chunks = [pc.cast(chunk, "large_binary") for chunk in column.chunks if len(chunk)]
    for texts in chunks:
        lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        digest.update(lengths.astype(np.int64).tobytes())
    for texts in chunks:
        _, offsets, content = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset :]
        digest.update(content[int(ends[0]) : int(ends[len(texts)])])


def return_freed_memory() -> None:
    """Give the system what reading and comparing texts has freed: several times their size."""
    pyarrow.default_memory_pool().release_unused()
    host.return_freed_memory()
