"""Faults of disk and process at each call with which a checkpoint is written."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import CheckpointDamaged
from finetune.runs import checkpoint
from finetune.runs.checkpoint import (
    intact_checkpoints,
    read_checkpoint,
    remove_old_checkpoints,
    write_checkpoint,
)

CALLS = [(os, "mkdir"), (os, "fsync"), (os, "replace"), (checkpoint, "save_file"),
         (Path, "write_text"), (Path, "chmod"), (shutil, "rmtree")]  # fmt: skip


class Kill(BaseException):
    """The process ends: nothing catches it, nothing is cleaned up."""


class Faults:
    """Lets the call of a number, counted over all functions, go wrong."""

    def __init__(self, at: int, error: BaseException, *, tears: bool) -> None:
        self.at, self.error, self.tears, self.count = at, error, tears, 0

    def plant(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count - 1 != self.at:
                return original(*arguments, **options)
            if self.tears:
                original(*arguments, **options)
                self._tear(name, arguments)
            raise self.error

        monkeypatch.setattr(owner, name, call)

    def _tear(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Leave half of a file, as a full disk and a power cut do."""
        if name in ("save_file", "write_text"):
            file = Path(arguments[1] if name == "save_file" else arguments[0])
            os.truncate(file, file.stat().st_size // 2)


def write_step(folder: Path, update: int) -> None:
    tensors = {group: {"weight": torch.full((8,), float(update))} for group in ("model", "random")}
    write_checkpoint(folder / f"step-{update}", tensors=tensors, state={"update": update})
    remove_old_checkpoints(folder, keep=2)


@pytest.mark.parametrize("tears", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "io"), Kill()])
def test_no_checkpoint_that_verifies_is_wrong(
    error: BaseException, tears: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, reached = 0, True
    while reached:
        folder = tmp_path / str(at)
        folder.mkdir()
        for update in (1, 2, 3):
            write_step(folder, update)
        with monkeypatch.context() as patch:
            faults = Faults(at, error, tears=tears)
            for owner, name in CALLS:
                faults.plant(owner, name, patch)
            with suppress(OSError, Kill):
                write_step(folder, 4)
            reached = faults.count > at
        for path in folder.glob("step-?"):
            try:
                tensors, state = read_checkpoint(path)
            except CheckpointDamaged:
                continue
            assert state == {"update": int(path.name[5:])}
            assert all((one["weight"] == state["update"]).all() for one in tensors.values())
        assert len(intact_checkpoints(folder, emit=lambda event: None)) >= 2
        write_step(folder, 5)
        assert sorted(path.name for path in folder.iterdir())[-1] == "step-5"
        at += 1
    assert at > 15
