"""Loaded data: a ``Dataset`` with the columns text, text_pair and label for every source."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo, Features, Value
from datasets.fingerprint import generate_random_fingerprint
from datasets.table import InMemoryTable
from numpy.typing import NDArray

from finetune.data.columns import Columns
from finetune.devices import host
from finetune.tasks.base import Task


@dataclass(frozen=True)
class DataSource:
    """The source of data: a file with its sha256, or a dataset of the Hub at a commit."""

    name: str
    sha256: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class LoadedData:
    """Splits, including ``train``; for a table also its columns, chosen and all.

    ``row_numbers`` has the number of each row of a split in its table, which may contain more rows.
    ``places`` describes such a row: ``line 7 of reviews.csv (id 5)``. ``unlabeled`` has texts
    without a label, in the same columns as a split. ``names`` has a row for each class, with its
    name or description as the text.
    """

    splits: DatasetDict
    task: Task
    sources: Sequence[DataSource] = ()
    chosen: Columns = field(default_factory=dict)
    column_names: Sequence[str] = ()
    row_numbers: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    places: Mapping[str, Callable[[int], str]] = field(default_factory=dict)
    unlabeled: pyarrow.Table | None = None
    names: Dataset | None = None

    def numbers_of(self, split: str) -> NDArray[np.int64]:
        """Return the number of each row of a split in its table, from 0: [rows]."""
        return self.row_numbers.get(split, np.arange(len(self.splits[split])))

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a table that were read, by option."""
        return {option: column.name for option, column in self.chosen.items()}


class TextColumns(NamedTuple):
    """The texts of rows, and the second texts of sentence pairs."""

    texts: pyarrow.ChunkedArray
    pairs: pyarrow.ChunkedArray | None = None

    @property
    def columns(self) -> list[pyarrow.ChunkedArray]:
        """The one column, or both."""
        return [self.texts] if self.pairs is None else [self.texts, self.pairs]

    @property
    def joined(self) -> pyarrow.ChunkedArray:
        """The texts to show or count; the texts of pairs are joined by ``|``."""
        if self.pairs is None:
            return self.texts
        return pc.binary_join_element_wise(self.texts, self.pairs, " | ")


def make_dataset(texts: Any, labels: Any, *, task: Task, pairs: Any = None) -> Dataset:
    """Return a data set of texts and of labels as the task parses them, in Arrow or as strings."""
    columns = {"text": texts} if pairs is None else {"text": texts, "text_pair": pairs}
    features = Features({**dict.fromkeys(columns, Value("string")), "label": task.feature})
    arrays = [*map(_strings, columns.values()), task.encode(_strings(labels))]
    rows = pyarrow.table(arrays, schema=features.arrow_schema)
    return _dataset_of(rows, DatasetInfo(features=features))


def _strings(values: Any) -> Any:
    is_arrow = isinstance(values, pyarrow.Array | pyarrow.ChunkedArray)
    return values if is_arrow else pyarrow.array(values, "string")


def _dataset_of(rows: pyarrow.Table, info: DatasetInfo) -> Dataset:
    # A fingerprint is only used by the cache of map(). Without it, all rows would be pickled.
    return Dataset(InMemoryTable(rows), info=info, fingerprint=generate_random_fingerprint())


def rows_where(table: Dataset, mask: NDArray[np.bool_]) -> Dataset:
    """Return the rows for which a mask of shape [rows] is true."""
    # select() would keep all rows and look up each row by its number on every access.
    return _dataset_of(table.with_format("arrow")[:].filter(pyarrow.array(mask)), table.info)


def column_of(table: Dataset, name: str) -> pyarrow.ChunkedArray:
    """Return a column as Arrow."""
    return table.with_format("arrow", columns=[name])[:][name]


def texts_of(table: Dataset) -> TextColumns:
    """Return the texts of rows, or their pairs."""
    names = [name for name in ("text", "text_pair") if name in table.column_names]
    return TextColumns(*(column_of(table, name) for name in names))


def update_with_texts(digest: "hashlib._Hash", column: pyarrow.ChunkedArray) -> None:
    """Add the lengths and bytes of texts to a digest, independent of their chunks."""
    chunks = [pc.cast(chunk, "large_binary") for chunk in column.chunks if len(chunk)]
    for texts in chunks:
        lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        digest.update(lengths.astype(np.int64).tobytes())
    for texts in chunks:
        _, offsets, content = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset :]
        digest.update(content[int(ends[0]) : int(ends[len(texts)])])


def return_freed_memory() -> None:
    """Return freed memory to the system; reading texts frees several times their size."""
    pyarrow.default_memory_pool().release_unused()
    host.return_freed_memory()


def number_texts(
    texts: pyarrow.ChunkedArray, pairs: pyarrow.ChunkedArray | None = None
) -> NDArray[np.int64]:
    """Return the number of each text, in order of appearance; case and spaces do not matter."""
    numbers = _number(texts)
    if pairs is None:
        return numbers
    return _number_values(pyarrow.chunked_array([numbers * len(numbers) + _number(pairs)]))


def number_splits(
    splits: Mapping[str, Sequence[pyarrow.ChunkedArray]],
) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the texts, or pairs, of each split; equal texts have one number."""
    tables = [
        pyarrow.table([*columns], ["text", "pair"][: len(columns)]) for columns in splits.values()
    ]
    numbers = number_texts(*pyarrow.concat_tables(tables).columns)
    ends = np.cumsum([len(columns_of_split[0]) for columns_of_split in splits.values()])[:-1]
    return dict(zip(splits, np.split(numbers, ends), strict=True))


def _number(texts: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    return _number_values(pyarrow.chunked_array(map(_normalize, texts.chunks), "string"))


def _normalize(texts: pyarrow.Array) -> pyarrow.Array:
    """Return texts in lower case, stripped, with single spaces between words."""
    normal = pc.ascii_lower(pc.ascii_trim_whitespace(texts))
    # Arrow folds only the case of ASCII, and is slow at joining words that it split at spaces.
    has_gaps = pc.match_substring_regex(texts, "[[:cntrl:]]|  ")
    is_other = pc.or_(has_gaps, pc.invert(pc.string_is_ascii(texts)))
    others = (" ".join(text.casefold().split()) for text in texts.filter(is_other).to_pylist())
    return pc.replace_with_mask(normal, is_other, pyarrow.array(others, "string"))


def _number_values(values: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    codes = [chunk.indices.to_numpy() for chunk in values.dictionary_encode().chunks]
    return np.concatenate([np.empty(0, np.int64), *codes]).astype(np.int64)
