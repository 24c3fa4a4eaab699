"""The data of a run: the same rows for the same options, every time."""

from dataclasses import fields
from typing import Any

from finetune.config.schema import OPTIONS, DataConfig
from finetune.data.load import kind_of_source, load_splits
from finetune.data.source import DataOptions, LoadedData
from finetune.data.split import SplitOptions
from finetune.errors import UsageError
from finetune.events import Emit


def load_run_data(config: DataConfig, *, emit: Emit) -> LoadedData:
    """Load and split the data of a run: the same rows for the same options, every time."""
    return load_splits(data_options(config), split_options(config), emit=emit)


def data_options(config: DataConfig) -> DataOptions:
    """Return what of a configuration says which data to load.

    Raises:
        UsageError: If an option does not go with the source of the data.
    """
    source = kind_of_source(config.data)
    for one in fields(config):
        option, value = OPTIONS[one.name], getattr(config, one.name)
        if option.goes_with and source not in option.goes_with and value != option.default:
            raise UsageError(
                f"--data {config.data} takes no {option.flag} (here {value})",
                remedy=f"leave it out: it goes with {' or '.join(option.goes_with)}",
            )
    return DataOptions(**_fields_of(DataOptions, config))


def split_options(config: DataConfig) -> SplitOptions:
    """Return what of a configuration says how the data is split."""
    return SplitOptions(**_fields_of(SplitOptions, config))


def _fields_of(kind: type[DataOptions | SplitOptions], config: DataConfig) -> dict[str, Any]:
    names = (field.name for field in fields(kind))
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
