"""``finetune.find_batch`` and ``finetune find-batch``."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_finder.simulated_machines import SimulatedMachine, SimulatedRunner, runner
from tiny_runs import Command, Outcome

import finetune
from finetune.batch_finder.results import FoundBatches, Result
from finetune.commands.find_batch import show_batches
from finetune.config.schema import AutoTunedOption
from finetune.events import Event, Info, Trial
from finetune.training import precision as precision_module

__all__ = ["runner"]
# Up to 15 tokens: two special tokens, who, wrote, the (up to 8 times), name, and two digits.
TEXTS = [f"who wrote {'the ' * (number % 9)}name {number}" for number in range(60)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = [f"{text},{('a', 'b')[number % 2]}" for number, text in enumerate(TEXTS)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["text,label", *lines]))
    return path


def search(**options: Any) -> tuple[Result, ...]:
    return finetune.find_batch(device="cpu", fresh=True, max_length=16, **options).results


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, ["full", "lora", "head"]),
        ({"train_layers": 2}, ["last-2"]),
        ({"train_layers": 2, "lora_rank": 4}, ["lora-last-2"]),
    ],
)
def test_find_batch_searches_full_lora_and_head_by_default(
    options: Mapping[str, Any], modes: list[str], runner: SimulatedRunner, tiny_folder: Path
) -> None:
    results = search(model=tiny_folder, limit=3, **options)
    assert [one.mode for one in results] == modes
    assert [one.stores_features for one in results] == [
        mode not in ("full", "lora") for mode in modes
    ]
    assert [one.largest for one in results] == [3] * len(modes)


def test_search_is_limited_to_the_training_rows_and_uses_the_longest_text(
    runner: SimulatedRunner, tiny_folder: Path, table: Path
) -> None:
    emitted: list[Event] = []
    [result, *_] = finetune.find_batch(
        model=tiny_folder, data=table, device="cpu", fresh=True, emit=emitted.append
    ).results
    # 6 of 60 rows are held out for testing. 10% would be too few for validation.
    assert (result.largest, result.padded_length) == (54, 15)
    assert Info(f"the longest text of {table} has 15 tokens") in emitted


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_search_uses_the_precision_of_a_run(
    precision: Any, runner: SimulatedRunner, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    choice = AutoTunedOption("precision", precision, "ms", {}, "set by a test")
    monkeypatch.setattr(precision_module, "choose_precision", lambda *_, **__: choice)
    results = search(model=tiny_folder, limit=1)
    assert {case.precision for case in runner.cases} == {precision}
    show_batches(FoundBatches(results=results), folder=None)
    title, *lines = capsys.readouterr().out.splitlines()
    place = title.split().index("precision")
    assert all(line.split()[place] == precision for line in lines[:3])


def test_mean_pooling_layer_is_counted_once(runner: SimulatedRunner, tiny_folder: Path) -> None:
    search(model=tiny_folder, limit=1, pooling="mean")
    assert {case.architecture["num_hidden_layers"] for case in runner.cases} == {4}


def test_sizes_for_another_mac_are_estimated(tiny_folder: Path) -> None:
    options: dict[str, Any] = {"freeze_core": True, "feature_cache": False}
    [result] = finetune.find_batch(machine="m3-8gb", model=tiny_folder, **options).results
    assert (result.machine, result.device, result.padded_length) == ("m3-8gb", "mps", 64)
    assert 0 < result.largest <= 5452  # TREC training rows


@pytest.fixture
def find_batch(command: Command, tiny_folder: Path, tmp_path: Path) -> Command:
    """Return a function that runs the command with a tiny model on the CPU."""

    def find(*arguments: str | Path) -> Outcome:
        return command(
            "find-batch", "--model", tiny_folder, "--device", "cpu", "--cache-dir",
            tmp_path / "cache", "--output-dir", tmp_path / "found", *arguments,
        )  # fmt: skip

    return find


@pytest.mark.slow
def test_search_prints_a_table_and_caches_its_results(find_batch: Command, tmp_path: Path) -> None:
    outcome = find_batch(
        "--train-layers", "1", "--no-feature-cache", "--max-length", "16", "--limit", "2"
    )
    assert outcome.code == 0, outcome.errors
    header, line, *notes = [line for line in outcome.output.splitlines() if line]
    columns = "device mode precision tokens largest too big GiB budget fastest use trials seconds"
    assert header.split() == columns.split()
    assert " ".join(line.split()).startswith("cpu last-1, no stored features ")
    assert notes == [f"results: {tmp_path / 'found'}"]
    assert "searching on cpu: last-1, 16 tokens" in outcome.errors
    assert "  batch 2: fits, 0." in outcome.errors
    [result] = json.loads((tmp_path / "found" / "find-batch.json").read_text())["results"]
    assert 0 < result["peak_bytes"] < result["budget_bytes"]
    assert len(list((tmp_path / "cache" / "batches").iterdir())) == 1


def test_exit_code_is_5_if_no_batch_fits(
    runner: SimulatedRunner, find_batch: Command, tmp_path: Path
) -> None:
    runner.machine = SimulatedMachine(capacity_share=0.001)
    outcome = find_batch("--max-length", "16", "--limit", "1")
    outcome.assert_rejected(5, "not even a single example fits", "--max-length", "--memory")
    assert "batch 1: too big" in outcome.errors
    assert not (tmp_path / "found").exists()


RESULT = Result(
    device="cpu", mode="head", padded_length=48, precision="fp32", stores_features=True,
    budget_bytes=2**30, largest=8, first_failed=9, recommended=6, fastest=7,
    features_batch_size=5, peak_bytes=2**29, trials=(Trial(5, "fits"), Trial(8, "fits")), seconds=2,
)  # fmt: skip
ESTIMATE = Result(
    machine="m1-8gb", device="mps", mode="full", padded_length=512, precision="fp32", largest=3,
    recommended=2, highest=4, first_failed=None, fastest=None, budget_bytes=2**30,
    peak_bytes=2**29, basis="measurements",
)  # fmt: skip


def test_tables_of_searches_and_estimates_have_notes(capsys: pytest.CaptureFixture[str]) -> None:
    full = replace(RESULT, mode="full", stores_features=False, features_batch_size=None,
                   first_failed=None, predicted_largest=2000, largest=1234)  # fmt: skip
    show_batches(FoundBatches((RESULT, full)), folder="runs/found")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:] == [
        "cpu head fp32 48 8 9 0.50 1.00 7 6 2 2",
        "cpu full fp32 48 1,234 - 0.50 1.00 7 6 2 2",
        "head at 48 tokens: use --eval-batch-size 5 to extract features",
        "full at 48 tokens: the search hit its time limit; predicted maximum: 2,000 examples",
        "results: runs/found",
    ]
    show_batches(FoundBatches((ESTIMATE, replace(ESTIMATE, mode="last-2"))), folder=None)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1] == "m1-8gb full fp32 512 3 - 0.50 1.00 - 2 - -"
    notes = ["full: 2 to 4 examples fit", "last-2, no stored features: 2 to 4 examples fit"]
    assert lines[3:] == ["measurements", *notes]
