"""What ``--precision auto`` makes of a run; timings are planted, but for one."""

import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prepared_runs import parameters_of, prepare_tiny, train_tiny, was_emitted
from tiny_runs import have_same_bits, run_tiny

import finetune
from finetune.devices.batch_size import BatchSize
from finetune.devices.cpu import CpuDevice
from finetune.errors import BatchDoesNotFit, Interrupted
from finetune.events import Emit, Event, Info, Step, WarningMessage, ignore
from finetune.files import read_json
from finetune.runs import precision
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import Manifest
from finetune.runs.precision import note_parity, with_precision
from finetune.runs.preparation import Preparation
from finetune.training import precision_timing
from finetune.training.precision_result import PrecisionTiming

FASTER = PrecisionTiming("step", {"fp32": 0.2, "bf16": 0.1}, logits_error=0.01)
SLOWER = PrecisionTiming("step", {"fp32": 0.1, "bf16": 0.2})
LONG: dict[str, Any] = {"precision": "auto", "batch_size": 2, "max_steps": 60}
SHORT: dict[str, Any] = {"precision": "auto", "max_train_samples": 16, "max_steps": 3}


class PlantedTiming:
    """Counts the timings that are asked for, and gives each the same result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.result = 0, FASTER
        self.act: Callable[[], None] = lambda: None
        monkeypatch.setattr(precision, "time_precisions", self.time)

    def time(self, *_: Any, **__: Any) -> PrecisionTiming:
        self.count += 1
        self.act()
        return self.result


@pytest.fixture
def times_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "MIN_BATCHES", 1)


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> PlantedTiming:
    return PlantedTiming(monkeypatch)


def choose(model: Path, cache: Path, *, emit: Emit = ignore, **options: Any) -> Preparation:
    preparation = prepare_tiny(model, cache_dir=str(cache), **LONG | options)
    batch_size = preparation.config.training.batch_size
    assert isinstance(batch_size, int)
    size = BatchSize(batch_size, "batch size", preparation.device, ignore)
    return with_precision(preparation, size, emit=emit)


def chosen(preparation: Preparation) -> str:
    return preparation.config.training.precision


def training_options(run: Path) -> dict[str, Any]:
    options: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())["training"]
    return options


@pytest.mark.usefixtures("times_short_runs")
def test_a_run_that_chose_fp32_has_the_bits_of_one_that_was_given_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = precision.time_precisions

    def time_really(*arguments: Any, **options: Any) -> PrecisionTiming:
        assert taken(*arguments, **options).work == "step"
        return SLOWER

    monkeypatch.setattr(precision, "time_precisions", time_really)
    # On a busy machine, products alone may say that bf16 is slower.
    monkeypatch.setattr(precision_timing, "_MAX_PRODUCT", math.inf)
    options = {"model": tiny_folder, "cache_dir": str(tmp_path / "cache")}
    auto = train_tiny(tmp_path / "auto", **options, **SHORT)
    given = train_tiny(tmp_path / "fp32", **options, **SHORT | {"precision": "fp32"})
    assert auto.config.training.precision == "fp32"
    assert have_same_bits(parameters_of(auto), parameters_of(given))


@pytest.mark.usefixtures("times_short_runs")
def test_the_choice_and_both_timings_are_shown_and_kept(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    run, cache = tmp_path / "run", str(tmp_path / "cache")
    run_tiny(run, model=tiny_folder, cache_dir=cache, emit=events.append, **SHORT)
    words = "one step takes 200.0 ms in fp32 and 100.0 ms in bf16"
    assert was_emitted(events, Info, f"precision: bf16, {words}")
    results = read_json(run / "all_results.json")
    assert results["precision"] == "bf16"
    assert results["precision_timing"]["seconds"] == {"fp32": 0.2, "bf16": 0.1}
    page = (run / "report.html").read_text()
    assert "200 ms for one step" in page
    assert "100 ms for one step" in page
    assert words in (run / "model" / "README.md").read_text()
    manifest = Manifest.read(RunFolder(run))
    assert manifest.metrics_precision == training_options(run)["precision"] == "bf16"
    assert timing.count == 1


@pytest.mark.usefixtures("times_short_runs")
def test_a_resumed_run_does_not_time_and_keeps_its_timing(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Step):
            signal.raise_signal(signal.SIGINT)

    run, cache = tmp_path / "run", str(tmp_path / "cache")
    with pytest.raises(Interrupted):
        run_tiny(run, model=tiny_folder, cache_dir=cache, emit=stop, **SHORT)
    shutil.rmtree(cache)
    results = finetune.run(resume_from_checkpoint=str(run), precision="auto")
    assert (timing.count, results.facts.precision) == (1, "bf16")
    assert results.facts.precision_timing == FASTER


def test_a_cache_that_can_not_be_written_costs_another_timing_and_no_run(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert chosen(choose(tiny_folder, tmp_path / "file")) == "bf16"
    assert timing.count == 2


def test_a_timing_is_remembered_for_the_same_work_on_the_same_machine(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(choose(tiny_folder, tmp_path)) == "bf16"
    timing.result = SLOWER
    assert chosen(choose(tiny_folder, tmp_path, seed=7, learning_rate=1e-5)) == "bf16"
    assert timing.count == 1
    for other in ({"freeze_core": True}, {"batch_size": 3}):
        assert chosen(choose(tiny_folder, tmp_path, **other)) == "fp32"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert chosen(choose(tiny_folder, tmp_path)) == "fp32"
    assert timing.count == 4


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3},
        # Only the features take the encoder: of 64 + 81 + 270 rows.
        {"max_steps": 1000, "freeze_core": True, "batch_size": 16},
        {"precision": "bf16"},
    ],
)
def test_nothing_is_timed_where_it_would_not_pay_or_is_not_asked_for(
    options: dict[str, Any], timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    preparation = choose(tiny_folder, tmp_path, **options)
    assert chosen(preparation) == options.get("precision", "fp32")
    assert (timing.count, preparation.precision_timing) == (0, None)


def test_a_dry_run_times_nothing(timing: PlantedTiming, tiny_folder: Path) -> None:
    plan = finetune.commands.run.dry_run(model=str(tiny_folder), data="questions", device="cpu")
    assert (timing.count, plan.facts.precision) == (0, "auto")


def test_fp32_is_kept_with_a_warning_where_bf16_has_other_results(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    timing.result = PrecisionTiming("step", FASTER.seconds, logits_error=0.5)
    assert chosen(choose(tiny_folder, tmp_path, emit=events.append)) == "fp32"
    assert was_emitted(events, WarningMessage, "logits of a batch are off by 50%")


@pytest.mark.parametrize("error", [MemoryError(), BatchDoesNotFit("too little", remedy="")])
def test_fp32_is_kept_where_memory_runs_out(
    error: BaseException, timing: PlantedTiming, tiny_folder: Path, tmp_path: Path
) -> None:
    def run_out() -> None:
        raise error

    timing.act = run_out
    preparation = choose(tiny_folder, tmp_path)
    assert (chosen(preparation), preparation.precision_timing) == ("fp32", None)


def test_a_device_with_silent_faults_needs_parity_first(
    timing: PlantedTiming, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "has_silent_faults_in_16_bits", True)
    monkeypatch.setattr("finetune.hub.cache_folder", lambda name: tmp_path / name)
    assert chosen(choose(tiny_folder, tmp_path)) == "fp32"
    note_parity(CpuDevice(), precision="fp16", subject="BERT", passes=True)
    assert chosen(choose(tiny_folder, tmp_path)) == "fp32"
    note_parity(CpuDevice(), precision="bf16", subject="BERT", passes=True)
    assert chosen(choose(tiny_folder, tmp_path)) == "bf16"
    note_parity(CpuDevice(), precision="bf16", subject="MiniLM", passes=False)
    assert chosen(choose(tiny_folder, tmp_path)) == "fp32"
    note_parity(CpuDevice(), precision="bf16", subject="MiniLM", passes=True)
    assert chosen(choose(tiny_folder, tmp_path)) == "bf16"
