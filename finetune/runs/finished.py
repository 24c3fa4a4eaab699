"""Finished runs: which of several folders hold one, and what each has found."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.schema import Config
from finetune.errors import NotARun
from finetune.events import Emit, WarningMessage
from finetune.files import read_json, read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults, read_results
from finetune.tasks.metrics import WeightedMetrics


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """What a finished run has left.

    Args:
        path: Its folder.
        test_digest: Of the texts and labels of its test split.
        predictions: The rows of ``predictions.jsonl``.
        weighted_metrics: The metrics that they decide, by how often each row counts.
    """

    path: Path
    config: Config
    results: RunResults
    test_digest: str
    predictions: Sequence[Mapping[str, Any]]
    weighted_metrics: WeightedMetrics

    @classmethod
    def read(cls, folder: RunFolder) -> "FinishedRun":
        """Read what a run has left.

        Raises:
            NotARun: If a file is missing or can't be read.
        """
        results, config = read_results(folder), folder.read_config()
        try:
            digest = read_json(folder.manifest_file)["splits"]["test"]
            predictions = read_jsonl(folder.predictions_file)
            weighted_metrics = results.task.weighted_metrics(predictions)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotARun(
                f"{folder.manifest_file.name} or {folder.predictions_file.name} of {folder.path} "
                "is missing or can't be read",
                remedy="restore it, or make the run again",
            ) from error
        if len(predictions) != results.test.samples:
            raise NotARun(
                f"{folder.predictions_file} has {len(predictions):,} rows, and the run was tested "
                f"on {results.test.samples:,}",
                remedy="restore the file, or make the run again",
            )
        return cls(folder.path, config, results, digest, predictions, weighted_metrics)


def find_finished_runs(paths: Sequence[Path], *, emit: Emit) -> list[RunFolder]:
    """Return the runs in folders, each once, in the order of the folders and of their names.

    Args:
        paths: Run folders, or folders that contain some; there, those that have not finished are
            left out with a warning.
        emit: Receives progress events.

    Raises:
        NotARun: If a folder is no finished run and contains none.
    """
    found: dict[Path, RunFolder] = {}
    for path in paths:
        for folder in _runs_of(path, emit=emit):
            found.setdefault(folder.path.resolve(), folder)
    return list(found.values())


def _runs_of(path: Path, *, emit: Emit) -> list[RunFolder]:
    folder = RunFolder(path)
    if folder.has_finished:
        return [folder]
    if folder.config_file.is_file():
        raise NotARun(
            f"the run in {path} has not finished",
            remedy=f"finish it with finetune run --resume-from-checkpoint {path}",
        )
    begun = [*_begun_runs(path)]
    finished = [one for one in begun if one.has_finished]
    if not finished:
        raise NotARun(
            f"{path} is neither a finished run nor a folder of finished runs",
            remedy="name folders that finetune run has written, such as runs/trec-minilm-full",
        )
    for one in begun:
        if one not in finished:
            emit(WarningMessage(f"{one.path} is left out: the run has not finished"))
    return finished


def _begun_runs(parent: Path) -> Iterator[RunFolder]:
    if not parent.is_dir():
        return
    for path in sorted(parent.iterdir(), key=_natural_order):
        folder = RunFolder(path)
        # A link would name a run of this folder twice.
        if folder.config_file.is_file() and not path.is_symlink():
            yield folder


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return what sorts ``seed-10`` behind ``seed-9``."""
    parts = re.findall(r"\d+|\D+", path.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]
