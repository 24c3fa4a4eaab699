"""What is asked for as data, and what was loaded: splits, and where they are from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.errors import UsageError
from finetune.tasks.base import Task

if TYPE_CHECKING:
    from datasets import DatasetDict

    from finetune.data.columns import Columns

# Of the names of datasets of the Hub.
HUB_PREFIX = "hub:"
# In place of the name of a column of splits.
NO_COLUMN = "none"
SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclass(frozen=True)
class DataOptions:
    """Which data to load, as the options of the same names say it.

    Args:
        data: ``trec``; ``questions``, which comes with the package; a file; or ``hub:owner/name``,
            maybe with ``@revision``, for a dataset of the Hub.
        label: ``label-coarse`` or, for TREC, ``label-fine``.
        data_dir: Where TREC's raw files are; ``None`` to fetch them.
        encoding: Python's name of the encoding of text files; ``None`` to detect it.
        header: Whether the first row of CSV and TSV names the columns; ``None`` to detect it.
        task: Name of a kind of labels, or ``auto`` to find it.
        earlier_columns: Columns by option that a run has read: where an option is ``None``, a table
            that has its column is read as before.
    """

    data: str
    label: str
    data_dir: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    encoding: str | None = None
    header: bool | None = None
    split_column: str | None = None
    label_names: str | None = None
    skip_unknown_labels: bool = False
    task: str = "auto"
    earlier_columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def named_columns(self) -> list[str]:
        """The columns that options name, each part of a list too, and the earlier ones."""
        named = filter(None, (self.text_column, self.text_pair_column, self.label_column))
        return [part for name in (*named, *self.earlier_columns.values())
                for part in (name, *name.split(","))]  # fmt: skip

    def __post_init__(self) -> None:
        for name in (value for value in vars(self).values() if isinstance(value, str)):
            if "\0" in name or name != name.encode(errors="replace").decode():
                raise UsageError(f"the name {name!r} is not UTF-8", remedy="rename it")


@dataclass(frozen=True)
class DataSource:
    """What data was read from: a file with its sha256, or a dataset of the Hub at a commit."""

    name: str
    sha256: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class LoadedData:
    """Splits, ``train`` among them, with the columns of ``make_dataset``.

    Args:
        splits: By name.
        task: What their labels are.
        sources: What they were read from.
        chosen: The columns of a table that were read.
        column_names: All columns of a table.
    """

    splits: "DatasetDict"
    task: Task
    sources: Sequence[DataSource] = ()
    chosen: "Columns | None" = None
    column_names: Sequence[str] = ()

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a table that were read, by the options that name them."""
        return self.chosen.by_option if self.chosen else {}
