"""What is asked for as data, and what was loaded: splits, and where they are from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.config.schema import DataConfig
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
class OtherData(DataConfig):
    """Other data than a run's: where its tables have the columns of the run, these are read."""

    earlier_columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSource:
    """What data was read from: a file with its sha256, or a dataset of the Hub at a commit."""

    name: str
    sha256: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class LoadedData:
    """Splits, ``train`` among them; of a table, the columns that were read, and all."""

    splits: "DatasetDict"
    task: Task
    sources: Sequence[DataSource] = ()
    chosen: "Columns" = field(default_factory=dict)
    column_names: Sequence[str] = ()

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a table that were read, by the options that name them."""
        return {option: column.name for option, column in self.chosen.items()}
