"""The data of a run: the same rows for the same options, every time."""

from dataclasses import fields
from typing import Any

from finetune.config.schema import DataConfig
from finetune.data.load import load_splits
from finetune.data.source import DataOptions, LoadedData
from finetune.data.split import SplitOptions
from finetune.events import Emit


def load_run_data(config: DataConfig, *, emit: Emit) -> LoadedData:
    """Load and split the data of a run: the same rows for the same options, every time."""
    return load_splits(data_options(config), split_options(config), emit=emit)


def data_options(config: DataConfig) -> DataOptions:
    """Return what of a configuration says which data to load."""
    return DataOptions(**_fields_of(DataOptions, config))


def split_options(config: DataConfig) -> SplitOptions:
    """Return what of a configuration says how the data is split."""
    return SplitOptions(**_fields_of(SplitOptions, config))


def _fields_of(kind: type[DataOptions | SplitOptions], config: DataConfig) -> dict[str, Any]:
    names = (field.name for field in fields(kind))
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
