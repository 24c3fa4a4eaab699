"""Runs over what a frozen core gave once: the same models, and never from another one's states."""

import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetune.pipeline.examples import encode_split
from finetune.pipeline.features import extract_features
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, save_tiny_model, save_uncuttable_model
from tiny_runs import (
    QUICK,
    have_same_bits,
    logged_metrics,
    run_tiny,
    start_finetune,
    weights_of,
)
from tiny_training import FewShapesDevice, give_few_shapes
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import finetune
from finetune.config.load import load_config
from finetune.config.schema import HEAD_DEFAULTS
from finetune.devices.batch_size import BatchSize
from finetune.devices.cpu import CpuDevice
from finetune.errors import Interrupted
from finetune.events import Advance, Emit, Event, Stage, Update, WarningMessage
from finetune.files import read_json, read_jsonl
from finetune.model.freeze import trained_names
from finetune.model.mode import Mode
from finetune.model.structure import find_structure
from finetune.runs.plan import plan_training
from finetune.runs.preparation import Preparation, prepare

MODES: dict[str, dict[str, Any]] = {
    "last-1": {"train_layers": 1},
    "last-2": {"train_layers": 2},
    "head": {"freeze_core": True},
    "classifier": {"head": "classifier"},
}
# Adam makes steps of the learning rate's size even out of gradients that are rounding errors.
CLOSE: dict[str, Any] = {"learning_rate": 1e-4, "num_train_epochs": 3, "validation_fraction": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    return {name: save_tiny_model(root / name, name) for name in ARCHITECTURES}


@contextmanager
def counting_rows() -> Iterator[list[int]]:
    """Yield a list that gets the rows of every forward of an attention's first projection.

    Forwards of two made-up texts, which look for the cut, do not count.
    """
    rows: list[int] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        if type(module).__name__ == "BertSelfAttention" and len(inputs[0]) > 3:
            rows.append(len(inputs[0]))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield rows
    finally:
        handle.remove()


def was_emitted(events: list[Event], kind: type[Stage] | type[WarningMessage], words: str) -> bool:
    return any(isinstance(event, kind) and words in event.message for event in events)


def largest_difference(run: Path, other: Path) -> float:
    weights, others = weights_of(run), weights_of(other)
    assert weights.keys() == others.keys()
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


def run_both(model: Path, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """Make a run over kept states, and the same with the whole model at every update."""
    emitted: list[Event] = []
    cached, plain = tmp_path / "cached", tmp_path / "plain"
    run_tiny(cached, model=model, cache_dir=str(tmp_path / "cache"), emit=emitted.append, **options)
    assert was_emitted(emitted, Stage, "running the frozen core once over 64 train rows")
    emitted.clear()
    run_tiny(plain, model=model, feature_cache=False, emit=emitted.append, **options)
    assert not was_emitted(emitted, Stage, "frozen core")
    return cached, plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_the_whole_model_at_every_update(
    architecture: str, mode: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    cached, plain = run_both(folders[architecture], tmp_path, **CLOSE, **MODES[mode])
    assert largest_difference(cached, plain) < 1e-5
    results, expected = (read_json(one / "all_results.json") for one in (cached, plain))
    assert results["test_accuracy"] == expected["test_accuracy"]
    assert results["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-5)
    assert results["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-5)


@pytest.mark.parametrize("mode", ["last-1", "head"])
@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "modernbert"])
def test_weights_are_the_same_where_batches_have_few_shapes(
    architecture: str,
    mode: str,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_few_shapes(monkeypatch)
    options = {**CLOSE, "max_train_samples": 64, "eval_batch_size": 48, **MODES[mode]}
    cached, plain = run_both(folders[architecture], tmp_path, **options)
    assert largest_difference(cached, plain) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_bf16_differs_by_what_another_batch_makes_of_its_eight_bits(
    mode: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {**CLOSE, **MODES[mode], "precision": "bf16"}
    cached, plain = run_both(folders["bert"], tmp_path, **options)
    # 12 updates of at most the learning rate, on both sides.
    assert 0 < largest_difference(cached, plain) < 1e-3
    results, expected = (read_json(one / "all_results.json") for one in (cached, plain))
    assert results["test_loss"] == pytest.approx(expected["test_loss"], abs=2e-3)


def test_bf16_keeps_states_in_two_bytes_a_number(folders: dict[str, Path], tmp_path: Path) -> None:
    sizes = {}
    for precision in ("fp32", "bf16"):
        cache = tmp_path / precision
        run_tiny(
            tmp_path / f"run-{precision}",
            model=folders["modernbert"],
            cache_dir=str(cache),
            precision=precision,
            max_steps=1,
            freeze_core=True,
        )
        sizes[precision] = {json.loads(file.read_text())["dtype"] for file in cache.rglob("*.json")}
    assert sizes["fp32"] == {"float32"}
    assert sizes["bf16"] <= {"bfloat16", "float32"}


@pytest.mark.parametrize("mode", ["last-1", "head"])
def test_bert_with_padding_in_front_trains_the_same(mode: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "bert")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    emitted: list[Event] = []
    options = {**CLOSE, **MODES[mode]}
    cached, plain = tmp_path / "cached", tmp_path / "plain"
    run_tiny(cached, model=model, cache_dir=str(tmp_path), emit=emitted.append, **options)
    run_tiny(plain, model=model, feature_cache=False, **options)
    assert largest_difference(cached, plain) < 1e-5
    # A token's position, and so its state, depends on the other texts of the batch.
    assert was_emitted(emitted, WarningMessage, "can't be cut off")


def test_a_model_that_can_not_be_cut_is_told_and_trains_whole(tmp_path: Path) -> None:
    model = save_uncuttable_model(tmp_path / "model")
    emitted: list[Event] = []
    options = {"train_layers": 1, "max_steps": 2, "cache_dir": str(tmp_path / "cache")}
    run_tiny(tmp_path / "run", model=model, emit=emitted.append, **options)
    assert was_emitted(
        emitted, WarningMessage, "frozen part of ConvBertForSequenceClassification can't be cut"
    )
    assert not (tmp_path / "cache").exists()
    run_tiny(tmp_path / "plain", model=model, feature_cache=False, **options)
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(tmp_path / "plain"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_whole_model_is_saved_and_answers_elsewhere_as_it_did_here(
    architecture: str, mode: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    run, source = tmp_path / "run", folders[architecture]
    options = {**MODES[mode], "learning_rate": 1e-2, "cache_dir": str(tmp_path / "cache")}
    results = run_tiny(run, model=source, **options)

    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    trained = trained_names(find_structure(model), mode=Mode(mode))
    before = load_file(source / "model.safetensors")
    after = {f"{model.base_model_prefix}.{name}": name for name in before}
    saved = weights_of(run)
    assert saved.keys() == model.state_dict().keys()
    for name, origin in after.items():
        if name not in trained:
            assert torch.equal(saved[name], before[origin]), name

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    rows = [row for row in read_jsonl(run / "predictions.jsonl") if len(row["text"]) < 40]
    for row in rows[:12]:
        inputs = tokenizer(row["text"], return_tensors="pt")
        with torch.no_grad():
            likelihoods = model(**inputs).logits.softmax(-1)[0]
        assert model.config.id2label[int(likelihoods.argmax())] == row["predicted"]
        assert likelihoods.max().item() == pytest.approx(row["probability"], abs=1e-5)
    metrics = finetune.evaluate(run, device="cpu")
    assert metrics["accuracy"] == results["test_accuracy"]
    assert metrics["loss"] == pytest.approx(results["test_loss"], abs=1e-5)


def config_of(**options: Any) -> Any:
    flags = QUICK | {"max_train_samples": 16, "validation_fraction": 0} | options
    return load_config(file=None, environment={}, flags=flags, assignments=()).config


def runs_core(prepared: Preparation, emit: Emit = lambda event: None) -> bool:
    """Bring the training rows through what is frozen; return whether it ran."""
    emitted: list[Event] = []
    examples = {"train": encode_split(prepared, "train", emit=emit)}
    plan = plan_training(prepared, examples)
    rows = prepared.config.training.eval_batch_size
    extract_features(
        prepared,
        examples,
        padded_lengths=plan.padded_lengths,
        batch_size=BatchSize(rows, "evaluation batch size", prepared.device, emit),
        emit=emitted.append,
    )
    assert was_emitted(emitted, Stage, "running the") != was_emitted(emitted, Stage, "reusing what")
    return was_emitted(emitted, Stage, "running the")


@pytest.fixture
def prepared_again(tiny_folder: Path, tmp_path: Path) -> Callable[..., Preparation]:
    """Return a function that prepares a run with a store in which ``last-1``'s states are kept."""
    options = {"model": str(tiny_folder), "cache_dir": str(tmp_path / "cache"), "train_layers": 1}

    def prepare_again(**changes: Any) -> Preparation:
        chosen = {name: one for name, one in (options | changes).items() if one is not None}
        return prepare(config_of(**chosen), emit=lambda event: None)

    assert runs_core(prepare_again())
    assert not runs_core(prepare_again())
    return prepare_again


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"learning_rate": 1e-5},
        {"num_train_epochs": 9},
        {"batch_size": 4},
        {"effective_batch_size": 32},
        {"weight_decay": 0.3},
        {"class_weights": "balanced"},
        {"max_length": 60},  # no text is as long
        {"cache_gib": 3},
    ],
    ids=str,
)
def test_what_the_states_do_not_depend_on_brings_no_forward_of_the_core(
    changes: dict[str, Any], prepared_again: Callable[..., Preparation]
) -> None:
    with counting_rows() as rows:
        assert not runs_core(prepared_again(**changes))
    assert rows == []


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 6},
        {"max_train_samples": 17},
        {"precision": "bf16"},
        {"train_layers": 2},
        {"train_layers": 3},
        {"train_layers": None, "freeze_core": True},
        {"train_layers": None, "head": "classifier"},
        {"eval_batch_size": 8},
    ],
    ids=str,
)
def test_what_the_states_depend_on_runs_the_core_again(
    changes: dict[str, Any], prepared_again: Callable[..., Preparation]
) -> None:
    assert runs_core(prepared_again(**changes))


def flip_a_bit(model: nn.Module) -> None:
    weight = model.get_parameter("bert.embeddings.word_embeddings.weight")
    weight.data.view(torch.int32)[299, 31] ^= 1


def move_positions(model: nn.Module) -> None:
    model.get_buffer("bert.embeddings.position_ids").roll(1)
    model.get_buffer("bert.embeddings.position_ids")[0, 0] = 1


@pytest.mark.parametrize(
    "change",
    [
        flip_a_bit,
        move_positions,
        lambda model: setattr(model.config, "hidden_act", "relu"),
        lambda model: setattr(model.config, "layer_norm_eps", 1e-5),
        lambda model: setattr(model.config, "position_embedding_type", "relative_key"),
    ],
    ids=["weight", "buffer", "activation", "eps", "positions"],
)
def test_another_model_runs_again(
    change: Callable[[Any], None], prepared_again: Callable[..., Preparation]
) -> None:
    prepared = prepared_again()
    change(prepared.classifier.model)
    assert runs_core(prepared)


def test_a_trained_weight_may_be_another(prepared_again: Callable[..., Preparation]) -> None:
    prepared = prepared_again()
    prepared.classifier.model.get_parameter("classifier.weight").data += 1
    assert not runs_core(prepared)


def test_a_model_may_lie_elsewhere(
    tiny_folder: Path, prepared_again: Callable[..., Preparation], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in tiny_folder.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    assert not runs_core(prepared_again(model=str(elsewhere)))
    weights = load_file(elsewhere / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"].view(torch.int32)[3] ^= 1
    save_file(weights, elsewhere / "model.safetensors", metadata={"format": "pt"})
    assert runs_core(prepared_again(model=str(elsewhere)))


@pytest.mark.parametrize("package", ["torch", "transformers", "finetune-mps"])
def test_another_version_runs_again(
    package: str, prepared_again: Callable[..., Preparation], monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = importlib.metadata.distribution

    def pretend(name: str) -> Any:
        return SimpleNamespace(version="99.0") if name == package else distribution(name)

    monkeypatch.setattr(importlib.metadata, "distribution", pretend)
    assert runs_core(prepared_again())


@pytest.mark.parametrize("attribute", ["name", "description"])
def test_another_device_runs_again(
    attribute: str, prepared_again: Callable[..., Preparation]
) -> None:
    device = CpuDevice()
    setattr(device, attribute, "another one")
    assert runs_core(replace(prepared_again(), device=device))


def test_other_batches_run_again(prepared_again: Callable[..., Preparation]) -> None:
    assert runs_core(replace(prepared_again(), device=FewShapesDevice()))


def write_table(file: Path, *, label: str = "", text: str = "") -> str:
    rows = [f'"who wrote {number} {text}","{label}{"ab"[number % 2]}"' for number in range(100)]
    file.write_text("\n".join(["text,label", *rows]))
    return str(file)


def test_other_texts_run_again_and_other_labels_do_not(
    prepared_again: Callable[..., Preparation], tmp_path: Path
) -> None:
    table = {"test_fraction": 0.25, "data": write_table(tmp_path / "rows.csv")}
    assert runs_core(prepared_again(**table))
    table["data"] = write_table(tmp_path / "names.csv", label="class ")
    assert not runs_core(prepared_again(**table))
    table["data"] = write_table(tmp_path / "texts.csv", text="?")
    assert runs_core(prepared_again(**table))


def test_another_tokenizer_runs_again(
    tiny_folder: Path, prepared_again: Callable[..., Preparation], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["the"], vocabulary["of"] = vocabulary["of"], vocabulary["the"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert runs_core(prepared_again(model=str(other)))


@pytest.mark.parametrize("mode", ["last-1", "head", "classifier"])
def test_a_second_run_with_another_seed_has_no_forward_of_the_core(
    mode: str, tiny_folder: Path, tmp_path: Path
) -> None:
    options = {**MODES[mode], "cache_dir": str(tmp_path / "cache")}
    run_tiny(tmp_path / "first", model=tiny_folder, **options)
    emitted: list[Event] = []
    with counting_rows() as rows:
        run_tiny(tmp_path / "second", model=tiny_folder, emit=emitted.append, seed=5, **options)
    layers = 1 if mode == "last-1" else 0
    # Two epochs of four updates, each followed by two validations; then both held-out splits.
    assert len(rows) == layers * (2 * (4 + 2) + 2 + 5)
    for split, count in {"train": 64, "validation": 81, "test": 270}.items():
        assert was_emitted(
            emitted, Stage, f"reusing what the frozen core gave for {count} {split} rows"
        )


def test_the_same_run_over_what_was_kept_has_the_same_bits(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        run_tiny(
            tmp_path / name, model=tiny_folder, train_layers=1, cache_dir=str(tmp_path / "cache")
        )
    first, second = tmp_path / "first", tmp_path / "second"
    assert have_same_bits(weights_of(first), weights_of(second))
    assert logged_metrics(first) == logged_metrics(second)


def test_damage_is_told_and_mended(tiny_folder: Path, tmp_path: Path) -> None:
    options = {"freeze_core": True, "cache_dir": str(tmp_path / "cache")}
    run_tiny(tmp_path / "first", model=tiny_folder, **options)
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[40] ^= 8
        file.write_bytes(content)
    emitted: list[Event] = []
    run_tiny(tmp_path / "second", model=tiny_folder, emit=emitted.append, **options)
    warnings = [event.message for event in emitted if isinstance(event, WarningMessage)]
    assert sum("is damaged" in warning for warning in warnings) == 3
    assert have_same_bits(weights_of(tmp_path / "first"), weights_of(tmp_path / "second"))
    emitted.clear()
    run_tiny(tmp_path / "third", model=tiny_folder, emit=emitted.append, **options)
    assert not was_emitted(emitted, WarningMessage, "damaged")


@pytest.mark.parametrize("mode", ["last-1", "head"])
def test_where_nothing_can_be_kept_the_run_goes_on_in_memory(
    mode: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    emitted: list[Event] = []
    options = MODES[mode]
    run_tiny(
        tmp_path / "run", model=tiny_folder, cache_dir=str(tmp_path / "file"), emit=emitted.append,
        **options,
    )  # fmt: skip
    assert was_emitted(emitted, WarningMessage, "stays in memory")
    assert (tmp_path / "file").read_text() == "no folder"
    run_tiny(tmp_path / "kept", model=tiny_folder, cache_dir=str(tmp_path / "cache"), **options)
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(tmp_path / "kept"))


def test_states_larger_than_the_limit_are_used_and_not_kept(
    tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    options = {"train_layers": 1, "cache_dir": str(tmp_path / "cache"), "cache_gib": 1e-6}
    run_tiny(tmp_path / "run", model=tiny_folder, emit=emitted.append, **options)
    assert not was_emitted(emitted, WarningMessage, "kept")
    assert list((tmp_path / "cache").rglob("*.*")) == []
    run_tiny(tmp_path / "kept", model=tiny_folder, **(options | {"cache_gib": 1}))
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(tmp_path / "kept"))


RUN_IN_A_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tiny_runs import run_tiny

run_tiny(Path(sys.argv[3]), model=Path(sys.argv[2]), train_layers=1, cache_dir=sys.argv[4])
"""


@pytest.mark.slow
def test_two_processes_that_keep_the_same_states_at_once_do_not_meet(
    tiny_folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    runs = [tmp_path / "first", tmp_path / "second"]
    tests = str(Path(__file__).parent.parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN_IN_A_CHILD, tests, tiny_folder, run, cache],
            stderr=subprocess.PIPE,
        )
        for run in runs
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert have_same_bits(weights_of(runs[0]), weights_of(runs[1]))
    assert len(list((cache / "features").iterdir())) == 3


def stop_at(happens: Callable[[Event], bool]) -> Emit:
    """Return a ``Emit`` that presses Ctrl-C once."""
    pressed: list[Event] = []

    def emit(event: Event) -> None:
        if happens(event) and not pressed:
            pressed.append(event)
            signal.raise_signal(signal.SIGINT)

    return emit


@pytest.mark.parametrize("first_has_cache", [True, False])
@pytest.mark.parametrize("second_has_cache", [True, False])
@pytest.mark.parametrize("mode", ["last-1", "head"])
def test_a_stopped_run_goes_on_with_or_without_what_is_kept(
    mode: str, second_has_cache: bool, first_has_cache: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    options = {**CLOSE, **MODES[mode], "cache_dir": str(tmp_path / "cache")}
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_tiny(whole, model=tiny_folder, feature_cache=first_has_cache, **options)
    with pytest.raises(Interrupted):
        run_tiny(
            run,
            model=tiny_folder,
            feature_cache=first_has_cache,
            emit=stop_at(lambda event: isinstance(event, Update) and event.update == 6),
            **options,
        )
    finetune.run(resume_from_checkpoint=run, feature_cache=second_has_cache)
    if first_has_cache == second_has_cache:
        assert have_same_bits(weights_of(run), weights_of(whole))
    else:
        assert largest_difference(run, whole) < 1e-5


def test_ctrl_c_while_the_core_runs_leaves_no_partial_file(
    tiny_folder: Path, tmp_path: Path
) -> None:
    options = {"freeze_core": True, "cache_dir": str(tmp_path / "cache"), "eval_batch_size": 8}
    with pytest.raises(Interrupted) as raised:
        run_tiny(
            tmp_path / "run",
            model=tiny_folder,
            emit=stop_at(lambda event: isinstance(event, Advance) and event.done == 32),
            **options,
        )
    assert raised.value.message == "stopped"
    assert list((tmp_path / "cache" / "features").iterdir()) == []
    results = run_tiny(tmp_path / "run", model=tiny_folder, overwrite=True, **options)
    assert results["epoch"] == 2.0


@pytest.mark.slow
def test_ctrl_c_on_the_command_while_the_core_runs_is_told_in_two_lines(
    tiny_folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    process = start_finetune(
        *("run", "--data", "questions", "--model", tiny_folder, "--device", "cpu"),
        *("--freeze-core", "--eval-batch-size", "1"),
        *("--output-dir", tmp_path / "run", "--cache-dir", cache),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "rows" in line and line.startswith("  "):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    error, remedy = errors.splitlines()[-2:]
    assert error == "error: stopped"
    assert remedy.startswith("  try: start it anew")
    assert list((cache / "features").glob("*.partial")) == []


def test_progress_is_told_from_the_first_rows_to_the_last(
    tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    run_tiny(
        tmp_path / "run",
        model=tiny_folder,
        freeze_core=True,
        cache_dir=str(tmp_path / "cache"),
        eval_batch_size=4,
        emit=emitted.append,
    )
    advances = [event for event in emitted if isinstance(event, Advance)]
    test_rows = [event.done for event in advances if event.total == 270]
    assert len(test_rows) <= 10
    assert test_rows == sorted(set(test_rows))
    assert test_rows[-1] == 270
    assert [event.total for event in advances if event.done == event.total] == [64, 81, 270]


def test_a_dry_run_does_not_run_the_core(tiny_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with counting_rows() as rows:
        finetune.run(
            **QUICK, model=str(tiny_folder), freeze_core=True, cache_dir=str(cache), dry_run=True
        )
    assert rows == []
    assert not cache.exists()


def test_a_full_run_keeps_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", model=tiny_folder, max_steps=1, cache_dir=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_the_time_of_the_frozen_pass_is_part_of_the_training_time(
    tiny_folder: Path, tmp_path: Path
) -> None:
    def wait(event: Event) -> None:
        if isinstance(event, Advance):
            time.sleep(0.2)

    options = {"freeze_core": True, "cache_dir": str(tmp_path / "cache")}
    results = run_tiny(tmp_path / "run", model=tiny_folder, emit=wait, **options)
    assert results["train_runtime"] > 0.6  # the three splits' last rows at least


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, 1 + HEAD_DEFAULTS.early_stopping_patience),
        ({"early_stopping_patience": 3}, 4),
        ({"early_stopping_patience": 0, "num_train_epochs": 25}, 25),
        ({"validation_fraction": 0, "num_train_epochs": 25}, 25),
        ({"validation_fraction": 0}, 100),
    ],
    ids=str,
)
def test_a_head_trains_until_it_improves_no_more(
    options: dict[str, Any], epochs: float, tiny_folder: Path, tmp_path: Path
) -> None:
    # Too low a rate for any answer to change: the first validation stays the best.
    slow = {"learning_rate": 1e-9, "num_train_epochs": None, "max_train_samples": 16}
    results = run_tiny(
        tmp_path / "run",
        model=tiny_folder,
        freeze_core=True,
        save_strategy="no",
        **(slow | options),
    )
    assert results["epoch"] == epochs
