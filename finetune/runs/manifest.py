"""The small files of a run: its inputs, its software, and how its model reads texts."""

import hashlib
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from finetune import distributed
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.errors import DataError, NotARunError, UsageError
from finetune.evaluation.statistics import threshold_for_precision
from finetune.events import Info, WarningMessage, emit
from finetune.files import SCHEMA_VERSION, write_json
from finetune.ownership import MANIFEST
from finetune.runs.folder import RunFolder

if TYPE_CHECKING:
    from finetune.data.dataset import LoadedData, Splits
    from finetune.runs.prepare import RunInputs
    from finetune.tasks.base import Labels, Logits, Task
    from finetune.training.plan import Plan

PACKAGES = (
    *("finetune-mps", "torch", "transformers", "tokenizers", "datasets"),
    *("accelerate", "evaluate", "numpy", "scipy"),
)
_SAVED_WITH_MODEL = {name: option for name, option in OPTIONS.items() if option.saved_with_model}


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of packages that affect results."""
    return {package: version(package) for package in PACKAGES}


@dataclass(frozen=True)
class Manifest:
    """The inputs of a run.

    Sources are absolute file paths with their sha256, or Hub datasets with their commit. Splits
    have a digest of texts and labels. ``columns`` maps options to columns of a table. ``options``
    has all options at the start of the run.
    """

    sources: Mapping[str, str]
    splits: Mapping[str, str]
    model: Mapping[str, str]
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Config | None = None

    @classmethod
    def of(cls, inputs: "RunInputs") -> "Manifest":
        """Return the manifest of a run that starts now."""
        source = inputs.text_model.source
        model = {"weights": source.weights_sha256, "tokenizer": source.tokenizer_sha256}
        return replace(
            cls.of_data(inputs.data),
            model=model | ({"commit": source.commit} if source.commit else {}),
            columns=inputs.data.columns,
        )

    @classmethod
    def of_data(cls, data: "LoadedData") -> "Manifest":
        """Return the part of a manifest about the data, for the current data."""
        sources = {}
        for source in data.sources:
            is_file = source.sha256 and source.name not in OPTIONS["data"].names
            if version := source.sha256 or source.commit:
                sources[str(Path(source.name).resolve()) if is_file else source.name] = version
        return cls(sources, digest_splits(data.splits, data.task), model={})

    @classmethod
    def read(cls, folder: RunFolder) -> "Manifest":
        """Return the manifest of a run, empty for a copy of only its model and configuration."""
        if not folder.manifest_file.exists():
            return cls({}, {}, {})
        return folder.read(folder.manifest_file, TypeAdapter(cls).validate_python)

    def write(self, folder: RunFolder) -> None:
        """Write ``manifest.json``."""
        ours = {"tool": "finetune", "kind": folder.kind, "schema_version": SCHEMA_VERSION}
        write_json(folder.manifest_file, {**ours, **asdict(self)})

    def check(self, now: "Manifest", *, remedy: str) -> None:
        """Raise ``DataError`` if data or model changed since the start of the run.

        Fields missing on either side are not compared.
        """
        words = {"sources": "{}", "splits": "the {} split", "model": "the model's {}"}
        differing = [
            words[part].format(name)
            for part in words
            for name, digest in getattr(now, part).items()
            if getattr(self, part).get(name, digest) != digest
        ]
        if differing:
            names = ", ".join(differing)
            raise DataError(
                f"changed since the run started: {names} (see {MANIFEST})", remedy=remedy
            )


def digest_splits(splits: "Splits", task: "Task") -> dict[str, str]:
    """Return the sha256 of each split's class names, texts and labels, in their order."""
    from finetune.data.dataset import texts_of, update_with_texts

    digests = {}
    for name, rows in splits.items():
        digest = hashlib.sha256("\0".join(task.class_names).encode())
        for column in texts_of(rows).columns:
            update_with_texts(digest, column)
        digest.update(task.labels(rows["label"]).tobytes())
        digests[name] = digest.hexdigest()
    return digests


def write_environment(folder: RunFolder, inputs: "RunInputs", plan: "Plan") -> None:
    """Write versions, machine, sources of options, and options chosen by measurement."""
    import torch

    count = distributed.world_size()
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "device": inputs.device.description,
        "threads": torch.get_num_threads(),
        "origins": dict(inputs.sources),
        "choices": [asdict(choice) for choice in plan.choices],
        **({"processes": count} if count > 1 else {}),
    }
    write_json(folder.environment_file, environment)


def read_threads(folder: RunFolder) -> int | None:
    """Return the number of CPU threads at the start of a run, if known."""
    with suppress(NotARunError):
        return folder.read(folder.environment_file, lambda content: int(content["threads"]))
    return None


def restore_threads(threads: int | None) -> None:
    """Use as many CPU threads as the first start, because another number changes the last bits."""
    import torch

    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))


def write_inference(
    folder: RunFolder, config: Config, *, max_tokens: int, reads_pairs: bool
) -> None:
    """Write ``inference.json`` next to a saved model, which reads ``max_tokens`` at once."""
    content = {name: option.value_in(config) for name, option in _SAVED_WITH_MODEL.items()}
    content["max_length"] = min(config.model.max_length, max_tokens)
    facts = {"schema_version": SCHEMA_VERSION, "reads_pairs": reads_pairs}
    write_json(folder.inference_file, {**facts, **content})


def reads_pairs(folder: RunFolder) -> bool:
    """Return whether the model of a run reads pairs of texts."""
    return folder.read(folder.inference_file, lambda content: bool(content["reads_pairs"]))


def read_trained_config(folder: RunFolder) -> Config:
    """Return the configuration of a run with the options of its ``inference.json``."""
    config = folder.read_config()

    def parse(content: Any) -> Config:
        changes = {name: content[name] for name in _SAVED_WITH_MODEL}
        changed = asdict(change_options(config, changes))
        return TypeAdapter(Config).validate_python(changed)

    return folder.read(folder.inference_file, parse)


def write_confidences(folder: RunFolder, task: "Task", logits: "Logits", labels: "Labels") -> None:
    """Write ``confidences.json`` next to a saved model, if it may abstain."""
    if not task.can_abstain:
        return
    probabilities, is_right = task.confidences(logits, labels)
    predicted = task.read_logits(logits).predicted
    classes = {
        name: {
            "probabilities": probabilities[predicted == number].tolist(),
            "is_right": is_right[predicted == number].tolist(),
        }
        for number, name in enumerate(task.class_names)
    }
    write_json(folder.confidences_file, {"schema_version": SCHEMA_VERSION, "classes": classes})


def find_lowest_probabilities(
    folder: RunFolder, *, min_confidence: float | None = None, target_precision: float | None = None
) -> Mapping[str, float] | None:
    """Return the probability per class below which the model abstains (maybe infinite), or None."""
    if min_confidence is None and target_precision is None:
        return None
    if min_confidence is not None and target_precision is not None:
        raise UsageError(
            "--min-confidence and --target-precision can't be combined", remedy="drop one of them"
        )
    task = folder.read_task()
    if not (task.can_abstain if target_precision is not None else task.class_names):
        option = "--min-confidence" if target_precision is None else "--target-precision"
        raise UsageError(
            f"{option} can't be used with a model of --task {task.name}", remedy="drop it"
        )
    if target_precision is None:
        return dict.fromkeys(task.class_names, min_confidence or 0.0)
    if not folder.confidences_file.is_file():
        raise UsageError(
            f"the run in {folder.path} has no confidences of validation rows",
            remedy="use --min-confidence, or repeat the run with --validation-fraction 0.1",
        )

    def parse(content: Any) -> dict[str, float | None]:
        rows = {name: content["classes"][name] for name in task.class_names}
        return {
            f"{name} ({len(of_class['is_right']):,} rows)": threshold_for_precision(
                np.array(of_class["probabilities"], float),
                np.array(of_class["is_right"], bool),
                precision=target_precision,
            )
            for name, of_class in rows.items()
        }

    thresholds = folder.read(folder.confidences_file, parse)
    reached = ", ".join(f"{name} {low:.3f}" for name, low in thresholds.items() if low is not None)
    emit(Info(f"confidence thresholds for precision {target_precision:g}: {reached or 'none'}"))
    if missed := ", ".join(name for name, low in thresholds.items() if low is None):
        message = "too few correct validation rows, so the model always abstains from"
        remedy = "lower --target-precision, or train with more validation rows"
        emit(WarningMessage(f"{message}: {missed}", remedy=remedy))
    lowest = (math.inf if low is None else low for low in thresholds.values())
    return dict(zip(task.class_names, lowest, strict=True))
