"""Runs with ``--batch-size auto`` on simulated machines."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from batch_finder.simulated_machines import (
    GIB,
    SimulatedMachine,
    SimulatedRunner,
    rising_from,
    runner,
    saturating,
)
from prepared_runs import prepare_tiny, was_emitted
from tiny_runs import run_tiny

from finetune import events
from finetune.events import Event, Info, sent_to
from finetune.runs.plan import make_plan

__all__ = ["runner"]


def run_auto(folder: Path, model: Path, emitted: list[Event], **options: Any) -> dict[str, int]:
    """Run with ``--batch-size auto``, and return the training options in its configuration."""
    run_tiny(
        folder / "run", model=model, batch_size="auto", cache_dir=str(folder / "cache"),
        emit=emitted.append, **options,
    )  # fmt: skip
    kept: dict[str, int] = yaml.safe_load((folder / "run" / "config.yaml").read_text())["training"]
    return kept


def tried_sizes(emitted: list[Event]) -> list[int]:
    return [event.batch_size for event in emitted if isinstance(event, events.Trial)]


def test_run_trains_and_evaluates_with_the_batch_size_found(
    runner: SimulatedRunner, tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, tiny_folder, emitted, effective_batch_size=16, eval_batch_size=64, max_steps=2,
        pooling="mean",
    )  # fmt: skip
    assert tried_sizes(emitted)[0] == 16
    # A batch of 64 was not tried in evaluation.
    assert kept["batch_size"] == kept["eval_batch_size"] == 16
    assert kept["effective_batch_size"] == 16
    assert [event.step for event in emitted if isinstance(event, events.Step)] == [1, 2]
    [case] = runner.cases
    assert (case.device, case.mode, case.classes, case.part) == ("cpu", "full", 6, "whole")
    assert (case.has_mean_layer, case.architecture["num_hidden_layers"]) == (True, 4)


def test_stored_features_get_separate_batch_sizes(
    runner: SimulatedRunner, tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    inputs = prepare_tiny(
        tiny_folder, cache_dir=str(tmp_path), freeze_core=True, batch_size="auto",
        effective_batch_size=16, eval_batch_size=64,
    )  # fmt: skip
    with sent_to(emitted.append):
        found = make_plan(inputs)
    assert (found.batch_size, found.eval_batch_size) == (16, 64)
    assert found.gradient_checkpointing is False
    assert tried_sizes(emitted) == [64, 16]
    assert [case.part for case in runner.cases] == ["features", "trainable"]
    assert Info("batch size: 16 in training, 64 in evaluation") in emitted


def short_machine(*, row_mib: float, row_seconds: float) -> SimulatedMachine:
    """Return a machine with 1 GiB and an overhead of 0.5 s per micro-batch."""
    return SimulatedMachine(
        peak_bytes=rising_from(floor=0, base=500, row=row_mib),
        step_seconds=saturating(start=0.5, row=row_seconds),
        budget_bytes=GIB,
    )


@pytest.mark.parametrize(("row_seconds", "is_on"), [(0.02, True), (0.2, False)])
def test_gradient_checkpointing_is_used_if_larger_micro_batches_are_faster(
    runner: SimulatedRunner, tiny_folder: Path, tmp_path: Path, row_seconds: float, is_on: bool
) -> None:
    runner.machine = short_machine(row_mib=100, row_seconds=0.015)
    runner.with_checkpointing = short_machine(row_mib=10, row_seconds=row_seconds)
    emitted: list[Event] = []
    kept = run_auto(tmp_path, tiny_folder, emitted, effective_batch_size=16, max_steps=1)

    assert [case.gradient_checkpointing for case in runner.cases] == [False, True]
    assert kept["gradient_checkpointing"] is is_on
    assert was_emitted(emitted, Info, f"gradient checkpointing: {'on' if is_on else 'off'}")
