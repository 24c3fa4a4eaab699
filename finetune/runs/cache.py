"""Folders of what is kept from run to run."""

from contextlib import suppress
from pathlib import Path

from finetune import hub
from finetune.config.schema import CacheConfig
from finetune.files import WRITTEN_BY, read_json
from finetune.model.tensor_store import TensorStore


def cache_folder(options: CacheConfig, name: str) -> Path:
    """Return the folder of one kind of files that are kept from run to run."""
    if options.cache_dir is None:
        return hub.cache_folder(name)
    return Path(options.cache_dir).expanduser() / name


def measured_files(options: CacheConfig) -> list[Path]:
    """Return our files of batch sizes and of timings of precisions that were measured."""
    folders = (cache_folder(options, name) for name in ("batches", "precision"))
    return [file for folder in folders for file in folder.glob("*.json") if _is_ours(file)]


def _is_ours(file: Path) -> bool:
    content = None
    with suppress(OSError, ValueError):
        content = read_json(file)
    return isinstance(content, dict) and content.items() >= WRITTEN_BY.items()


def open_tensor_store(options: CacheConfig) -> TensorStore:
    """Return the store that a configuration names."""
    folder = cache_folder(options, "features")
    return TensorStore(folder, limit_bytes=int(options.cache_gib * 2**30))
