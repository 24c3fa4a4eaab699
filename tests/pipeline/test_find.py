"""What is searched for, by the options; and a run that takes what a search found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import save_tiny_model, save_uncuttable_model
from tiny_runs import run_tiny

from finetune import events
from finetune.config.load import load_config
from finetune.errors import ConfigurationInvalid
from finetune.events import Event, Stage
from finetune.pipeline.find import Task, estimate_batches, find_batches

SMALL_MAC = "m1-8gb"
Rows = list[dict[str, Any]]


def task_of(*, limit: int | None = None, **flags: Any) -> Task:
    loaded = load_config(file=None, environment={}, flags=flags, assignments=())
    return Task(loaded.config, has_max_length="max_length" in flags, limit=limit, is_fresh=True)


def estimates(
    machine: str | None = SMALL_MAC, *, memory: str | None = None, limit: int | None = None,
    emitted: list[Event] | None = None, **flags: Any,
) -> Rows:  # fmt: skip
    """Return what a Mac is foretold to take, by the same options as a search."""
    found = estimate_batches(
        task_of(limit=limit, **flags), machine=machine, memory=memory,
        emit=(emitted if emitted is not None else []).append,
    )  # fmt: skip
    rows: Rows = found["estimates"]
    return rows


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        ({}, ("full", "head")),
        ({"freeze_core": True}, ("head",)),
        ({"train_layers": 2}, ("last-2",)),
        ({"head": "classifier"}, ("classifier",)),
    ],
)
def test_without_the_name_of_a_mode_all_and_the_head_are_looked_at(
    flags: Mapping[str, Any], modes: tuple[str, ...]
) -> None:
    assert task_of(**flags).modes == modes


def test_a_frozen_core_is_foretold_divided_and_undivided(tiny_folder: Path) -> None:
    rows = estimates(model=str(tiny_folder), max_length=16, limit=50)
    assert [(one["mode"], one["stores_features"]) for one in rows] == [
        ("full", False), ("head", True), ("head", False),
    ]  # fmt: skip
    assert [one["prefix_batch"] is None for one in rows] == [True, False, True]


def test_without_the_store_only_the_undivided_update_is_foretold(tiny_folder: Path) -> None:
    rows = estimates(
        model=str(tiny_folder), max_length=16, limit=50, freeze_core=True, feature_cache=False
    )
    assert [(one["mode"], one["stores_features"]) for one in rows] == [("head", False)]


def test_trec_is_known_without_a_file_and_the_articles_length_stands_beside_it(
    tmp_path: Path,
) -> None:
    model = save_tiny_model(tmp_path / "tiny", "bert")
    emitted: list[Event] = []
    rows = estimates(model=str(model), freeze_core=True, feature_cache=False, emitted=emitted)
    # This model has no more positions than 64.
    assert [one["max_length"] for one in rows] == [48, 64]
    assert Stage("the longest text of trec has 41 tokens") in emitted
    assert {one["highest_batch"] for one in rows} == {5452}


def test_a_given_length_is_the_only_one_within_the_models_positions(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "roberta")
    options: dict[str, Any] = {
        "model": str(model), "freeze_core": True, "feature_cache": False, "limit": 5
    }  # fmt: skip
    [short] = estimates(max_length=20, **options)
    [long] = estimates(max_length=512, **options)
    # A multiple of 8; and the positions of 64 that are behind the padding token's.
    assert (short["max_length"], long["max_length"]) == (24, 63)


def test_the_length_of_other_data_is_that_of_its_longest_text(
    tiny_folder: Path, tmp_path: Path
) -> None:
    texts = [f"who wrote {'the ' * (number % 9)}name {number}" for number in range(60)]
    lines = [f"{text},{('a', 'b')[number % 2]}" for number, text in enumerate(texts)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["text,label", *lines]))
    emitted: list[Event] = []
    own, _ = estimates(
        model=str(tiny_folder),
        data=str(table),
        freeze_core=True,
        feature_cache=False,
        emitted=emitted,
    )
    # Between its two special tokens: who, wrote, eight times the, name, and two digits.
    assert Stage(f"the longest text of {table} has 15 tokens") in emitted
    assert own["max_length"] == 16


@pytest.mark.parametrize(("given", "expected"), [({"limit": 7}, 7), ({"max_train_samples": 9}, 9)])
def test_no_size_beyond_the_limit_or_the_rows_is_named(
    given: dict[str, Any], expected: int, tiny_folder: Path
) -> None:
    [one] = estimates(
        model=str(tiny_folder), max_length=16, freeze_core=True, feature_cache=False, **given
    )
    assert (one["batch"], one["highest_batch"]) == (expected, expected)


def test_the_articles_mac_takes_one_row_of_512_tokens_and_64_where_the_core_is_frozen() -> None:
    rows = estimates(max_length=512)
    full, _, undivided = rows
    assert full["lowest_batch"] <= 1 <= full["highest_batch"]
    assert undivided["lowest_batch"] <= 64 <= undivided["highest_batch"]
    for one in rows:
        assert one["lowest_batch"] <= one["batch"] <= one["highest_batch"]
        assert (one["machine"], one["max_length"]) == (SMALL_MAC, 512)
        assert one["basis"]


@pytest.mark.parametrize(("version", "was_emitted"), [("2.13.0", True), ("2.14.0", False)])
def test_rows_that_fit_and_that_mps_computes_wrongly_are_told(
    version: str, was_emitted: bool, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    emitted: list[Event] = []
    estimates(model=str(tiny_folder), max_length=16, limit=5_000, emitted=emitted)
    warnings = [event.message for event in emitted if isinstance(event, events.WarningMessage)]
    assert warnings == (["more than 2,047 rows of 16 tokens fit"] if was_emitted else [])


def test_a_memory_names_a_mac_and_too_little_of_it_holds_nothing(tiny_folder: Path) -> None:
    options: dict[str, Any] = {
        "model": str(tiny_folder), "max_length": 16, "freeze_core": True, "feature_cache": False
    }  # fmt: skip
    [large] = estimates(None, memory="16GiB", **options)
    [small] = estimates(None, memory="1GiB", **options)
    assert (large["machine"], small["machine"]) == ("Mac with 16GiB", "Mac with 1GiB")
    assert large["batch"] > small["batch"] == small["highest_batch"] == 0


@pytest.mark.parametrize("memory", ["5", "1023MiB", "much", ""])
def test_a_memory_that_no_mac_has_is_refused(memory: str, tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationInvalid) as refused:
        estimates(None, memory=memory, model=str(tiny_folder))
    assert repr(memory) in refused.value.message


def test_what_was_found_is_told_on_the_way_and_the_time_is_that_on_the_wall(
    tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    task = task_of(
        model=str(tiny_folder), device="cpu", max_length=16, limit=3, train_layers=1,
        feature_cache=False, cache_dir=str(tmp_path),
    )  # fmt: skip
    [result] = find_batches(task, emit=emitted.append)["results"]
    probes = [event for event in emitted if isinstance(event, events.Probe)]
    assert [event.batch_size for event in probes] == [one["batch"] for one in result["probes"]]
    assert result["max_verified"] == 3
    assert result["seconds"] >= sum(event.seconds for event in probes)
    # A fresh search neither reads nor writes what is remembered.
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_can_not_be_cut_is_searched_whole(tmp_path: Path) -> None:
    emitted: list[Event] = []
    task = task_of(
        model=str(save_uncuttable_model(tmp_path / "model")), device="cpu", max_length=16,
        limit=1, train_layers=1, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    [result] = find_batches(task, emit=emitted.append)["results"]
    assert (result["max_verified"], result["stores_features"]) == (1, False)
    assert any(
        "can't be cut off" in one.message
        for one in emitted
        if isinstance(one, events.WarningMessage)
    )


def test_a_run_takes_the_size_that_was_found_and_keeps_its_updates(
    tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    run = tmp_path / "run"
    run_tiny(
        run, model=tiny_folder, batch_size="auto", effective_batch_size=16, eval_batch_size=8,
        max_steps=2, cache_dir=str(tmp_path / "cache"), emit=emitted.append,
    )  # fmt: skip
    training = yaml.safe_load((run / "config.yaml").read_text())["training"]
    probes = [event.batch_size for event in emitted if isinstance(event, events.Probe)]
    assert probes[0] == 16
    assert training["batch_size"] in probes
    assert training["effective_batch_size"] == 16
    assert training["eval_batch_size"] == max(8, 2 * training["batch_size"])
    assert [event.update for event in emitted if isinstance(event, events.Update)] == [1, 2]


def test_over_a_frozen_core_a_run_gets_two_sizes(tiny_folder: Path, tmp_path: Path) -> None:
    emitted: list[Event] = []
    run = tmp_path / "run"
    run_tiny(
        run, model=tiny_folder, batch_size="auto", effective_batch_size=1, eval_batch_size=4,
        max_steps=2, freeze_core=True, cache_dir=str(tmp_path / "cache"), emit=emitted.append,
    )  # fmt: skip
    training = yaml.safe_load((run / "config.yaml").read_text())["training"]
    assert training["batch_size"] == training["effective_batch_size"] == 1
    assert training["eval_batch_size"] in (1, 2, 3, 4)
    sizes = f"{training['batch_size']}, and {training['eval_batch_size']} without gradients"
    assert Stage(f"batch size: {sizes}") in emitted


def test_where_a_frozen_part_can_not_be_cut_off_the_whole_update_is_looked_at(
    tmp_path: Path,
) -> None:
    model = save_uncuttable_model(tmp_path / "model")
    emitted: list[Event] = []
    run_tiny(
        tmp_path / "run", model=model, batch_size="auto", effective_batch_size=4, max_steps=1,
        train_layers=1, eval_batch_size=1, cache_dir=str(tmp_path / "cache"), emit=emitted.append,
    )  # fmt: skip
    assert next(event for event in emitted if isinstance(event, events.Probe)).batch_size == 4
    training = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]
    # A batch twice as large may not fit where no more than its forward was probed.
    assert training["eval_batch_size"] == training["batch_size"]
    assert any(
        "can't be cut off" in one.message
        for one in emitted
        if isinstance(one, events.WarningMessage)
    )
