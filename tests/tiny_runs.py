"""Helpers for run tests, such as quick options and a function that runs the command."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import finetune
from finetune.events import Emit, Event
from finetune.files import read_json, read_jsonl, write_json, write_jsonl
from finetune.runs.folder import RunFolder

QUICK: dict[str, Any] = {
    "data": "questions",
    "device": "cpu",
    # Tiny models are equally fast in both precisions, so a timing would choose at random.
    "precision": "fp32",
    "validation_fraction": 0.1,
    "max_train_samples": 64,
    "batch_size": 16,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "epoch",
}
"""Two epochs of four steps, each of which is reported."""

TEXTS = ["Who wrote Faust?", "How old is the river Nile?", "What does NASA stand for?"]
SPEED_AND_MEMORY = {"examples_per_second", "memory_bytes", "reserved_bytes"}


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command."""

    code: int
    output: str
    errors: str

    def assert_rejected(self, code: int, *words: str) -> None:
        """Expect an exit code, empty standard output, and one error with one remedy."""
        assert self.code == code, self.errors
        assert self.output == ""
        assert "Traceback" not in self.errors
        *progress, error, remedy = self.errors.splitlines()
        assert error.startswith("error: ")
        assert remedy.startswith("  try: ")
        assert not any(line.startswith(("error:", "  try:")) for line in progress)
        for word in words:
            assert word in error + remedy


Command = Callable[..., Outcome]


def slow(value: Any) -> Any:
    """Return a test parameter that the quick tests skip."""
    return pytest.param(value, marks=pytest.mark.slow)


def run_tiny(folder: Path, *, model: Path, **options: Any) -> dict[str, Any]:
    """Fine-tune a tiny model in this process, by default with the quick options."""
    results = finetune.run(**(QUICK | options), model=str(model), output_dir=str(folder))
    return {**results.to_json(), "output_dir": results.output_dir}


def copy_run(
    run: Path,
    to: Path,
    *,
    answers: Sequence[Any] = (),
    rows: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> Path:
    """Copy the files of a finished run that ``finetune compare`` reads.

    Args:
        run: The run.
        to: The folder of the copy.
        answers: Predictions for the first test rows, which replace the existing ones.
        rows: Predicted test rows, which replace the existing ones.
        options: Options to change in the configuration.
    """
    (to / "model").mkdir(parents=True)
    for name in ("manifest.json", "model/config.json"):
        shutil.copy(run / name, to / name)
    rows = read_jsonl(run / "predictions.jsonl") if rows is None else [*rows]
    changed = [row | {"predicted": answer} for row, answer in zip(rows, answers, strict=False)]
    rows = changed + rows[len(changed) :]
    write_jsonl(to / "predictions.jsonl", rows)
    metrics = RunFolder(run).read_task().weighted_metrics(rows)(np.ones(len(rows)))
    found = {f"test_{name}": value for name, value in metrics.items()} | {"test_samples": len(rows)}
    write_json(to / "all_results.json", read_json(run / "all_results.json") | found)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    for option, value in options.items():
        config, lines = re.subn(rf"(?m)^  {option}: .*$", f"  {option}: {value}", config)
        assert lines == 1
    (to / "config.yaml").write_text(config, encoding="utf-8")
    return to


def flags(**options: Any) -> list[str]:
    """Return the quick options and ``options`` as command-line arguments."""
    return [
        word
        for option, value in (QUICK | options).items()
        for word in ("--" + option.replace("_", "-"), str(value))
    ]


def finetune_in_a_child(
    *arguments: str | Path, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "finetune", *arguments],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        **options,
    )


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of the saved model, by name."""
    return load_file(run / "model" / "model.safetensors")


def have_same_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of tensors have the same names and the same bits."""
    return some.keys() == others.keys() and all(
        torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8))
        for name, tensor in some.items()
    )


def at(kind: type[Event], value: int | str, act: Callable[[], object]) -> Emit:
    """Return an ``Emit`` that acts when a step is reported, or at the start of a stage."""

    def emit(event: Event) -> None:
        if isinstance(event, kind) and value == vars(event).get("step", vars(event).get("name")):
            act()

    return emit


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def logged_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` without speed and memory."""
    return [
        {name: value for name, value in row.items() if name not in SPEED_AND_MEMORY}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


def unfinished_files(folder: Path) -> list[Path]:
    """Return the leftovers of an interrupted write, such as partial files and dangling links."""
    return [
        path
        for path in folder.rglob("*")
        if path.suffix in {".partial", ".incomplete", ".discarded"} or not path.exists()
    ]
