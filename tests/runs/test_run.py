import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny_model
from tiny_runs import (
    QUICK,
    have_same_bits,
    logged_metrics,
    run_tiny,
    unfinished_files,
    weights_of,
)

import finetune
from finetune.errors import (
    ConfigurationInvalid,
    DataNotFound,
    FinetuneError,
    LossNotFinite,
    ModelNotFound,
    ModelUnsupported,
    RunFolderInUse,
    RunFolderNotEmpty,
    UsageError,
)
from finetune.events import Event, Stage, Update, Validation, WarningMessage
from finetune.files import read_json

HEAD = {"classifier.weight", "classifier.bias"}
POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


def config_text(run: Path) -> str:
    return (run / "config.yaml").read_text(encoding="utf-8")


def save_tiny_model_without_dropout(folder: Path) -> Path:
    save_tiny_model(folder)
    file = folder / "config.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('_dropout_prob": 0.1', '_dropout_prob": 0'), encoding="utf-8")
    return folder


def changed_parameters(run: Path, source: Path) -> set[str]:
    """Return the parameters of the source that differ in the run, and those that it lacks."""
    before = {f"bert.{name}": one for name, one in load_file(source / "model.safetensors").items()}
    return {
        name
        for name, after in weights_of(run).items()
        if name not in before or not torch.equal(after, before[name])
    }


def test_the_same_seed_gives_the_same_bits(
    finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run_tiny(tmp_path / "again", model=tiny_folder)
    assert have_same_bits(weights_of(tmp_path / "again"), weights_of(finished_run))
    assert logged_metrics(tmp_path / "again") == logged_metrics(finished_run)
    predictions = (tmp_path / "again" / "predictions.jsonl").read_bytes()
    assert predictions == (finished_run / "predictions.jsonl").read_bytes()


def test_another_seed_gives_other_weights_on_the_same_rows(
    finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run_tiny(tmp_path / "other", model=tiny_folder, seed=7)
    assert not have_same_bits(weights_of(tmp_path / "other"), weights_of(finished_run))
    texts = [
        [line.split('"label"')[0] for line in (run / "predictions.jsonl").read_text().splitlines()]
        for run in (tmp_path / "other", finished_run)
    ]
    assert texts[0] == texts[1]


def test_the_configuration_alone_makes_the_same_run_again_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    save_tiny_model(Path("tiny"))
    # Learning rate, epochs and effective batch size are left to their defaults.
    finetune.run(
        data="questions", model="tiny", device="cpu", max_train_samples=40, output_dir="first"
    )
    monkeypatch.chdir(elsewhere)
    finetune.run(str(home / "first" / "config.yaml"), output_dir="second")
    assert config_text(elsewhere / "second") == config_text(home / "first")
    assert have_same_bits(weights_of(elsewhere / "second"), weights_of(home / "first"))


def test_the_configuration_holds_the_defaults_that_depend_on_the_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run_tiny(
        tmp_path / "run",
        model=tiny_folder,
        learning_rate=None,
        num_train_epochs=None,
        freeze_core=True,
        max_steps=1,
    )
    text = config_text(tmp_path / "run")
    assert "learning_rate: 0.0005\n" in text
    assert "num_train_epochs: 100.0\n" in text
    assert "early_stopping_patience: 30\n" in text
    assert "weight_decay: 0.0\n" in text
    assert "effective_batch_size: 16\n" in text


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("classifier", {"head": "classifier"}, HEAD),
        ("head", {"freeze_core": True}, HEAD | POOLER),
        ("last-1", {"train_layers": 1}, HEAD | POOLER | {"bert.encoder.layer.2."}),
        (
            "last-2",
            {"train_layers": 2},
            HEAD | POOLER | {"bert.encoder.layer.1.", "bert.encoder.layer.2."},
        ),
    ],
)
def test_only_what_a_mode_trains_differs_from_the_source(
    mode: str, options: dict[str, Any], expected: set[str], tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, max_steps=2, **options)
    assert results["mode"] == mode
    changed = changed_parameters(tmp_path / "run", tiny_folder)
    assert {next((one for one in expected if name.startswith(one)), name) for name in changed} == (
        expected
    )
    trained = sum(one.numel() for name, one in weights_of(tmp_path / "run").items()
                  if name.startswith(tuple(expected)))  # fmt: skip
    assert results["trained_parameters"] == trained < results["total_parameters"]


def test_all_parameters_train_unless_told_otherwise(finished_run: Path, tiny_folder: Path) -> None:
    weights = weights_of(finished_run)
    assert changed_parameters(finished_run, tiny_folder) == set(weights)
    results = read_json(finished_run / "all_results.json")
    total = sum(one.numel() for one in weights.values())
    assert results["trained_parameters"] == results["total_parameters"] == total


@pytest.mark.parametrize(("rows", "expected"), [(5, 5), (10_000, 729)])
def test_the_training_rows_can_be_limited(
    rows: int, expected: int, tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, max_train_samples=rows, max_steps=1)
    assert (results["train_samples"], results["eval_samples"]) == (expected, 81)


def test_balanced_class_weights_change_what_is_learned(
    finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    run_tiny(tmp_path / "balanced", model=tiny_folder, class_weights="balanced")
    losses, balanced_losses = (
        [row["loss"] for row in logged_metrics(run) if row["kind"] == "update"]
        for run in (finished_run, tmp_path / "balanced")
    )
    assert balanced_losses[0] == pytest.approx(losses[0], rel=0.05)
    assert balanced_losses[0] != losses[0]


def test_classes_without_rows_do_no_harm_to_balanced_weights(
    tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(
        tmp_path / "run",
        model=tiny_folder,
        class_weights="balanced",
        max_train_samples=3,
        max_steps=2,
    )
    assert results["train_loss"] > 0


def test_batches_of_any_size_add_up_to_the_same_update(tmp_path: Path) -> None:
    source = save_tiny_model_without_dropout(tmp_path / "tiny")
    for batch_size in (3, 4, 8, 16):
        run_tiny(
            tmp_path / f"by-{batch_size}",
            model=source,
            batch_size=batch_size,
            effective_batch_size=8,
            class_weights="balanced",
            max_steps=4,
            # Adam makes steps of this size even out of gradients that are rounding errors.
            learning_rate=1e-4,
        )
    whole = weights_of(tmp_path / "by-8")
    for batch_size in (3, 4, 16):
        for name, tensor in weights_of(tmp_path / f"by-{batch_size}").items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


def test_bf16_computes_otherwise_and_saves_fp32(
    finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, precision="bf16")
    assert results["precision"] == "bf16"
    weights, exact = weights_of(tmp_path / "run"), weights_of(finished_run)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not have_same_bits(weights, exact)
    exact_loss = read_json(finished_run / "all_results.json")["train_loss"]
    assert results["train_loss"] == pytest.approx(exact_loss, rel=0.02)


def test_a_precision_that_the_device_lacks_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="fp16") as raised:
        run_tiny(tmp_path / "run", model=tiny_folder, precision="fp16")
    assert "fp32" in raised.value.remedy
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "updates", "validations_after"),
    [
        ({"max_steps": 3}, 3, [3]),
        ({"max_steps": 10}, 10, [4, 8, 10]),
        ({"num_train_epochs": 0.5}, 2, [2]),
        ({"num_train_epochs": 1.5}, 6, [4, 6]),
        ({"effective_batch_size": 64}, 2, [1, 2]),
        ({"batch_size": 100}, 2, [1, 2]),
        ({"max_train_samples": 33, "num_train_epochs": 1}, 3, [3]),
    ],
)
def test_updates_follow_from_epochs_rows_and_steps(
    options: dict[str, Any],
    updates: int,
    validations_after: list[int],
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    run_tiny(tmp_path / "run", model=tiny_folder, **options)
    rows = logged_metrics(tmp_path / "run")
    assert [row["update"] for row in rows if row["kind"] == "update"] == list(range(1, updates + 1))
    assert [row["update"] for row in rows if row["kind"] == "validation"] == validations_after


def test_a_run_that_no_longer_improves_stops_early(tiny_folder: Path, tmp_path: Path) -> None:
    results = run_tiny(
        tmp_path / "run",
        model=tiny_folder,
        learning_rate=1e-6,  # too low for any answer to change
        num_train_epochs=10,
        early_stopping_patience=2,
    )
    assert results["epoch"] == 3.0
    assert read_json(tmp_path / "run" / "trainer_state.json")["best_global_step"] == 4


def test_what_goes_on_is_told_in_order(tiny_folder: Path, tmp_path: Path) -> None:
    emitted: list[Event] = []
    run_tiny(tmp_path / "run", model=tiny_folder, emit=emitted.append, num_train_epochs=1)
    kinds = [type(event) for event in emitted if not isinstance(event, Stage | WarningMessage)]
    assert kinds == [Update, Update, Update, Update, Validation]
    stages = " ".join(event.message for event in emitted if isinstance(event, Stage))
    for word in ("device", "questions", "64 train", "mode full", "learning rate 0.001", "test"):
        assert word in stages
    last = [event for event in emitted if isinstance(event, Update)][-1]
    assert (last.update, last.total_updates, last.epoch) == (4, 4, 1.0)
    assert last.remaining_seconds == 0


def test_each_warning_is_told_once(tiny_folder: Path, tmp_path: Path) -> None:
    emitted: list[Event] = []
    run_tiny(tmp_path / "run", model=tiny_folder, emit=emitted.append, max_steps=1, max_length=8)
    warnings = [event.message for event in emitted if isinstance(event, WarningMessage)]
    assert len(warnings) == 3  # of the splits train, validation and test
    assert len(set(warnings)) == len(warnings)


def test_a_longer_text_than_the_model_has_positions_for_asks_for_nothing_impossible(
    tiny_folder: Path, tmp_path: Path
) -> None:
    emitted: list[Event] = []
    run_tiny(tmp_path / "run", model=tiny_folder, emit=emitted.append, max_steps=1, max_length=128)
    warnings = [event for event in emitted if isinstance(event, WarningMessage)]
    assert "64 tokens" in warnings[0].message  # as many as the model has positions
    assert "--max-length" not in warnings[0].remedy


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "no/such/folder"}, ModelNotFound),
        ({"data": "trec", "data_dir": "no/such/folder"}, DataNotFound),
        ({"data": "nothing"}, UsageError),
        ({"label": "label-fine"}, UsageError),
        ({"train_layers": 4}, ConfigurationInvalid),
        ({"validation_fraction": 1e-6}, FinetuneError),
    ],
)
def test_a_run_that_can_not_begin_leaves_no_folder(
    options: dict[str, Any], error: type[FinetuneError], tiny_folder: Path, tmp_path: Path
) -> None:
    model = Path(options.get("model", tiny_folder))
    others = {name: value for name, value in options.items() if name != "model"}
    with pytest.raises(error) as raised:
        run_tiny(tmp_path / "runs" / "first", model=model, **others)
    assert raised.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_told_as_such(tiny_folder: Path, tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "tiny")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ModelUnsupported):
        run_tiny(tmp_path / "run", model=source)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_explodes_names_the_rows_and_what_to_lower(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(LossNotFinite, match="rows") as raised:
        run_tiny(tmp_path / "run", model=tiny_folder, learning_rate=1e38)
    assert "--learning-rate" in raised.value.remedy


def test_a_model_that_answers_nothing_finite_is_told_as_such(
    tiny_folder: Path, tmp_path: Path
) -> None:
    # The only update leaves finite weights, so large that the logits overflow.
    with pytest.raises(LossNotFinite) as raised:
        run_tiny(tmp_path / "run", model=tiny_folder, learning_rate=1e20, max_steps=1)
    assert "--learning-rate" in raised.value.remedy


def test_a_learning_rate_too_low_to_change_a_weight_is_not_taken_for_a_fault_of_the_device(
    tiny_folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(tmp_path / "run", model=tiny_folder, learning_rate=1e-12, max_steps=2)
    assert results["epoch"] == 0.5


def test_a_folder_that_holds_a_run_is_refused_at_once_and_left_as_it_is(
    finished_run: Path, tiny_folder: Path
) -> None:
    emitted: list[Event] = []
    before = (finished_run / "all_results.json").stat().st_mtime_ns
    with pytest.raises(RunFolderNotEmpty, match="already holds a run"):
        run_tiny(finished_run, model=tiny_folder, emit=emitted.append)
    assert emitted == []
    assert (finished_run / "all_results.json").stat().st_mtime_ns == before


def test_a_run_can_be_overwritten(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_tiny(run, model=tiny_folder, max_steps=1)
    results = run_tiny(run, model=tiny_folder, max_steps=2, overwrite=True)
    assert results["epoch"] == 0.5
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]
    assert [row["update"] for row in logged_metrics(run)] == [1, 2, 2]
    assert "overwrite: false" in config_text(run)


def test_a_folder_of_the_users_is_never_overwritten(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderNotEmpty):
        run_tiny(tmp_path, model=tiny_folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_run_of_the_wrong_model_does_not_delete_the_run_to_overwrite(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_tiny(run, model=tiny_folder, max_steps=1)
    with pytest.raises(ModelNotFound):
        run_tiny(run, model=tmp_path / "no-model", overwrite=True)
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("folder", ["file/run", "file"])
def test_a_run_folder_that_can_not_be_made_is_told_as_such(
    folder: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError):
        run_tiny(tmp_path / folder, model=tiny_folder)


def test_runs_without_a_folder_are_named_after_what_they_train(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {
        "data": "questions",
        "model": str(tiny_folder),
        "device": "cpu",
        "max_train_samples": 16,
        "max_steps": 1,
    }
    folders = [
        finetune.run(**options)["output_dir"],
        finetune.run(**options)["output_dir"],
        finetune.run(**options, freeze_core=True)["output_dir"],
    ]
    assert folders == ["runs/questions-tiny-full", "runs/questions-tiny-full-2",
                       "runs/questions-tiny-head"]  # fmt: skip
    assert all(Path(folder, "model").is_dir() for folder in folders)


@pytest.mark.parametrize(
    "start",
    [
        lambda run: {"output_dir": run, "overwrite": True},
        lambda run: {"resume_from_checkpoint": run},
    ],
    ids=["overwrite", "resume"],
)
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(
    start: Callable[[str], dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    second = start(str(run))
    if "overwrite" in second:
        second |= QUICK | {"model": str(tiny_folder)}
    errors: list[FinetuneError] = []

    def start_a_second_one(event: Event) -> None:
        if isinstance(event, Validation) and event.update == 8:
            with pytest.raises(RunFolderInUse) as raised:
                finetune.run(**second)
            errors.append(raised.value)

    results = run_tiny(run, model=tiny_folder, emit=start_a_second_one)
    assert [error.exit_code for error in errors] == [2]
    assert results["epoch"] == 2.0
    assert unfinished_files(run) == []


def test_a_run_may_go_on_in_a_thread(finished_run: Path, tiny_folder: Path, tmp_path: Path) -> None:
    thread = threading.Thread(
        target=run_tiny, args=[tmp_path / "run"], kwargs={"model": tiny_folder}
    )
    thread.start()
    thread.join()
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(finished_run))


def test_signals_are_handled_as_before_once_a_run_is_over(finished_run: Path) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
