"""What is asked for as data, and what was loaded: splits, and where they are from."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from finetune.errors import UsageError
from finetune.tasks.base import Task

if TYPE_CHECKING:
    from datasets import DatasetDict

# Of the names of datasets of the Hub.
HUB_PREFIX = "hub:"


@dataclass(frozen=True)
class DataOptions:
    """Which data to load.

    Args:
        data: ``trec``; ``questions``, which comes with the package; a file; or ``hub:owner/name``,
            maybe with ``@revision``, for a dataset of the Hub.
        label: ``label-coarse`` or, for TREC, ``label-fine``.
        data_dir: Where TREC's raw files are; ``None`` to fetch them.
        text_column: Column of the texts in files and datasets of the Hub, by name or by number from
            1, or several between commas, whose texts are joined by line ends; ``None`` to guess it.
        text_pair_column: Column of the second texts of pairs; ``None`` to find pairs by name.
        label_column: Column of their classes; ``None`` to guess it.
        task: Name of a kind of labels, or ``auto`` to find it.
        encoding: Python's name of the encoding of text files; ``None`` to detect it.
        header: Whether the first row of CSV and TSV names the columns; ``None`` to detect it.
        split_column: Column that says the split of each row; ``None`` to find it, or ``none``.
        label_names: File with the name of a class on each line, for labels that are numbers.
        skip_unknown_labels: Skip rows of other splits whose label no training row has.
        earlier_columns: Columns by option, such as those that a run has read: where an option is
            ``None``, a table that has its column is read as before.

    Raises:
        UsageError: If a name is not UTF-8.
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

    def with_earlier(self, names: Collection[str]) -> "DataOptions":
        """Return the same for a table of some columns: with the earlier ones that it has."""
        given = (self.text_column, self.text_pair_column, self.label_column)
        taken = {
            option: name
            for option, name in self.earlier_columns.items()
            if getattr(self, option) is None and name in names and name not in given
        }
        return replace(self, **taken)  # type: ignore[arg-type]

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
    """Splits, ``train`` among them, with the columns of ``make_table``.

    Args:
        splits: By name.
        task: What their labels are.
        sources: What they were read from.
        columns: Of a table, those that were read, by the options that name them.
    """

    splits: "DatasetDict"
    task: Task
    sources: tuple[DataSource, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
