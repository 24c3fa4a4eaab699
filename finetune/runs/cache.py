"""Folders of what is kept from run to run."""

from pathlib import Path

from finetune import hub
from finetune.config.schema import CacheConfig
from finetune.model.feature_store import FeatureStore


def cache_folder(options: CacheConfig, name: str) -> Path:
    """Return the folder of one kind of files that are kept from run to run."""
    if options.cache_dir is None:
        return hub.cache_folder(name)
    return Path(options.cache_dir).expanduser() / name


def open_feature_store(options: CacheConfig) -> FeatureStore:
    """Return the store that a configuration names."""
    folder = cache_folder(options, "features")
    return FeatureStore(folder, limit_bytes=int(options.cache_gib * 2**30))
