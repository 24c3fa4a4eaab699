"""A run takes the batch sizes that a search has found; children are simulated."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from batch_finder.simulated_machines import GIB, SimulatedMachine, SimulatedProber, prober
from tiny_models import save_uncuttable_model
from tiny_runs import run_tiny, tiny_folder

from finetune import events
from finetune.events import Event, Stage

__all__ = ["prober", "tiny_folder"]


def run_auto(folder: Path, model: Path, emitted: list[Event], **options: Any) -> dict[str, int]:
    """Run with ``--batch-size auto``; return the options of training that it has kept."""
    run_tiny(
        folder / "run", model=model, batch_size="auto", cache_dir=str(folder / "cache"),
        emit=emitted.append, **options,
    )  # fmt: skip
    kept: dict[str, int] = yaml.safe_load((folder / "run" / "config.yaml").read_text())["training"]
    return kept


def probed_sizes(emitted: list[Event]) -> list[int]:
    return [event.batch_size for event in emitted if isinstance(event, events.Probe)]


def test_a_run_trains_and_evaluates_at_the_size_that_was_found(
    prober: SimulatedProber, tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, tiny_folder, emitted, effective_batch_size=16, eval_batch_size=64, max_steps=2
    )
    assert probed_sizes(emitted)[0] == 16
    # An evaluation of 64 examples was not probed.
    assert kept["batch_size"] == kept["eval_batch_size"] == 16
    assert kept["effective_batch_size"] == 16
    assert [event.update for event in emitted if isinstance(event, events.Update)] == [1, 2]
    [case] = prober.cases
    assert (case.device, case.mode, case.classes, case.part) == ("cpu", "full", 6, "whole")


def test_where_little_fits_updates_keep_their_size_in_several_batches(
    prober: SimulatedProber, tiny_folder: Path, tmp_path: Path
) -> None:
    prober.machine = SimulatedMachine(peak_bytes=lambda size: size * GIB, budget_bytes=4 * GIB)
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, tiny_folder, emitted, effective_batch_size=16, max_steps=1, memory_limit="4GiB"
    )
    assert kept["batch_size"] == kept["eval_batch_size"] <= 3
    assert kept["effective_batch_size"] == 16
    assert prober.limit_bytes == 4 * GIB


def test_where_features_are_stored_a_run_gets_two_sizes(
    prober: SimulatedProber, tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, tiny_folder, emitted, effective_batch_size=1, eval_batch_size=4, max_steps=2,
        freeze_core=True,
    )  # fmt: skip
    assert (kept["batch_size"], kept["eval_batch_size"]) == (1, 4)
    assert probed_sizes(emitted) == [4, 1]
    assert [case.part for case in prober.cases] == ["features", "trainable"]
    assert Stage("batch size: 1, and 4 without gradients") in emitted


@pytest.mark.parametrize("parts", [{}, {"feature_cache": False}])
def test_where_no_features_are_stored_the_whole_update_is_probed(
    parts: dict[str, Any], prober: SimulatedProber, tiny_folder: Path, tmp_path: Path
) -> None:
    model = tiny_folder if parts else save_uncuttable_model(tmp_path / "model")
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, model, emitted, effective_batch_size=4, eval_batch_size=1, max_steps=1,
        train_layers=1, **parts,
    )  # fmt: skip
    assert probed_sizes(emitted)[0] == 4
    assert kept["eval_batch_size"] == kept["batch_size"] == 4
    assert [case.part for case in prober.cases] == ["whole"]


@pytest.mark.slow
def test_a_real_search_finds_a_size_that_a_run_takes(tiny_folder: Path, tmp_path: Path) -> None:
    emitted: list[Event] = []
    kept = run_auto(
        tmp_path, tiny_folder, emitted, effective_batch_size=16, max_steps=1, freeze_core=True
    )
    assert {kept["batch_size"], kept["eval_batch_size"]} <= set(probed_sizes(emitted))
