"""Runs of tiny models without parts that a test doesn't need, such as the report."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_runs import QUICK

from finetune.config.load import load_config
from finetune.events import Event, Info, WarningMessage
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal
from finetune.runs.prepare import RunInputs, prepare
from finetune.runs.results import RunResults
from finetune.runs.run import Run


def prepare_tiny(model: Path, **options: Any) -> RunInputs:
    """Prepare a run of a tiny model with the quick options and ``options``. None removes one."""
    flags = {name: one for name, one in (QUICK | options).items() if one is not None}
    return prepare(load_config(flags=flags | {"model": str(model)}).config)


@contextmanager
def begin_run(inputs: RunInputs, path: Path) -> Iterator[Run]:
    """Yield a run that is ready for its next step, in a locked folder."""
    folder = RunFolder(path)
    with (
        folder.make(overwrite=False),
        Run.begin(inputs, folder, resumes=False, journal=Journal()) as run,
    ):
        yield run


def train_prepared(inputs: RunInputs, folder: Path) -> Run:
    """Train to the last step, and return the unfinished run."""
    with begin_run(inputs, folder) as run:
        run.train()
    return run


def train_tiny(folder: Path, *, model: Path, **options: Any) -> Run:
    """Prepare and train a tiny model with the quick options and ``options``."""
    return train_prepared(prepare_tiny(model, **options), folder)


def finish_run(run: Run) -> RunResults:
    """Finish a run, without model card and report."""
    return run.finish(write_pages=lambda *_: None)


def parameters_of(run: Run) -> dict[str, torch.Tensor]:
    """Return the current parameters of the whole model of a run, by name."""
    model = run.inputs.text_model.model
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def was_emitted(events: list[Event], kind: type[Info] | type[WarningMessage], words: str) -> bool:
    """Return whether a stage or a warning contains these words."""
    return any(isinstance(event, kind) and words in event.message for event in events)


def largest_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of tensors with the same names."""
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)
