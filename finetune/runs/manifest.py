"""What a run was made from, so that whoever uses it later works on the same."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from finetune.errors import DataDiffers, NotARun
from finetune.files import read_json, write_json
from finetune.runs.environment import package_versions

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from finetune.data.source import DataSource, LoadedData
    from finetune.model.source import ModelSource
    from finetune.runs.preparation import Preparation
    from finetune.tasks.base import Task

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a run was made from.

    Args:
        sources: sha256 of each source file by its path, or the commit of a Hub data set by its id.
        splits: A digest of each split's texts and labels in their order.
        model: Commit of the model on the Hub, and digests of its weights and tokenizer files.
        packages: Versions of the packages that compute.
        metrics_precision: ``fp32``, ``bf16`` or ``fp16``: of all metrics of the run.
        reads_pairs: Whether its rows are pairs of texts.
        columns: Of a table, those that were read, by the options that name them.
    """

    sources: Mapping[str, str]
    splits: Mapping[str, str]
    model: Mapping[str, str]
    packages: Mapping[str, str]
    metrics_precision: str
    reads_pairs: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the manifest as JSON, whole or not at all."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def of(cls, preparation: "Preparation") -> "Manifest":
        """Return the manifest of a run that begins now."""
        return cls(
            sources=describe_sources(preparation.sources),
            splits=digest_splits(preparation.splits, preparation.task),
            model=describe_model(preparation.text_model.source),
            packages=package_versions(),
            metrics_precision=preparation.config.training.precision,
            reads_pairs="text_pair" in preparation.splits["train"].column_names,
            columns=preparation.columns,
        )

    @classmethod
    def of_data(cls, data: "LoadedData") -> "Manifest":
        """Return the part of a manifest that says what the data is now."""
        splits = digest_splits(data.splits, data.task)
        return replace(_EMPTY, sources=describe_sources(data.sources), splits=splits)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Return the manifest in a file; an empty one where an older version has written none.

        Raises:
            NotARun: If the file can't be read as one.
        """
        if not path.is_file():
            return _EMPTY
        try:
            return TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError) as error:
            raise NotARun(
                f"{path} does not say what the run was made from",
                remedy="restore the file, or make the run again",
            ) from error

    def check(self, now: "Manifest", *, remedy: str) -> None:
        """Make sure that a configuration still stands for the same data and model.

        Args:
            now: Made from what there is now; what one of both lacks is not compared.
            remedy: What the user can do if something differs.

        Raises:
            DataDiffers: Naming the files, splits and parts of the model that differ.
        """
        differing = [
            *_differing(self.sources, now.sources),
            *(f"the {split} split" for split in _differing(self.splits, now.splits)),
            *(f"the model's {part}" for part in _differing(self.model, now.model)),
        ]
        if differing:
            raise DataDiffers(f"changed since the run began: {', '.join(differing)}", remedy=remedy)


_EMPTY = Manifest(sources={}, splits={}, model={}, packages={}, metrics_precision="")


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


def describe_model(source: "ModelSource") -> dict[str, str]:
    """Return a model's commit, if it is from the Hub, and digests of its weights and tokenizer."""
    commit = {"commit": source.commit} if source.commit else {}
    return {**commit, "weights": source.weights_sha256, "tokenizer": source.tokenizer_sha256}


def describe_sources(sources: "Sequence[DataSource]") -> dict[str, str]:
    """Return sha256 or commit of each source by its name; files by their absolute path."""
    return {
        str(Path(source.name).resolve()) if source.sha256 else source.name: digest
        for source in sources
        if (digest := source.sha256 or source.commit)
    }


def digest_splits(splits: "DatasetDict", task: "Task") -> dict[str, str]:
    """Return a digest of each split's texts and labels in their order."""
    return {name: digest_rows(rows, task) for name, rows in splits.items()}


def digest_rows(rows: "Dataset", task: "Task") -> str:
    """Return the sha256 of texts, labels and the names of the classes: 64 hexadecimal digits."""
    from finetune.data.dataset import column_of, texts_of, update_with_texts

    digest = hashlib.sha256("\0".join(task.class_names).encode())
    for column in texts_of(rows).columns:
        update_with_texts(digest, column)
    digest.update(task.labels(column_of(rows, "label")).tobytes())
    return digest.hexdigest()
