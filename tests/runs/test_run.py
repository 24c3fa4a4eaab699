"""Complete runs, from a configuration to a run folder."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import prepare_tiny, train_prepared
from tiny_models import save_tiny_model
from tiny_runs import have_same_bits, logged_metrics, run_tiny, slow, weights_of

import finetune
from finetune.errors import FinetuneError, LossNotFiniteError
from finetune.events import Event, Stage, WarningMessage
from finetune.runs.folder import RunFolder
from finetune.runs.run import failures_explained


def warnings_of(emitted: list[Event]) -> list[str]:
    return [event.message for event in emitted if isinstance(event, WarningMessage)]


def config_text(run: Path) -> str:
    return (run / "config.yaml").read_text(encoding="utf-8")


def test_same_seed_gives_identical_bits_in_a_thread(
    finished_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run_tiny, tmp_path / "again", model=tiny_folder).result()
    assert have_same_bits(weights_of(tmp_path / "again"), weights_of(finished_run))
    assert logged_metrics(tmp_path / "again") == logged_metrics(finished_run)
    predictions = (tmp_path / "again" / "predictions.jsonl").read_bytes()
    assert predictions == (finished_run / "predictions.jsonl").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 1.0, "save_steps": 1, "validation_fraction": 0.2},
        slow({"lora_rank": 4, "max_steps": 2}),
        {"freeze_core": True},
        {"freeze_core": True, "max_steps": 2},
        slow({"head": "classifier", "fit_head": "off", "num_train_epochs": 1.0}),
        slow({"contrastive": "on"}),
    ],
    ids=str,
)
def test_saved_config_reproduces_the_run_from_any_folder(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.training.plan.MIN_STEPS", 2)
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    save_tiny_model(Path("tiny"))
    # Learning rate, weight decay and effective batch size keep their defaults.
    first: list[Event] = []
    finetune.run(
        data="questions", model="tiny", device="cpu", max_train_samples=20, output_dir="first",
        emit=first.append, **options,
    )  # fmt: skip
    monkeypatch.chdir(elsewhere)
    # The precision must not be measured again.
    monkeypatch.delattr("finetune.runs.plan.choose_precision")
    second: list[Event] = []
    finetune.run(str(home / "first" / "config.yaml"), output_dir="second", emit=second.append)
    assert warnings_of(second) == warnings_of(first)
    assert config_text(elsewhere / "second") == config_text(home / "first")
    assert have_same_bits(weights_of(elsewhere / "second"), weights_of(home / "first"))


def test_nonfinite_loss_reports_texts_and_suggests_a_lower_learning_rate(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs = prepare_tiny(tiny_folder)
    torch.nn.init.constant_(inputs.text_model.model.get_parameter("classifier.bias"), torch.inf)
    with pytest.raises(
        LossNotFiniteError, match=r"at step 1, in a batch with texts such as"
    ) as raised:
        train_prepared(inputs, tmp_path / "run")
    assert "--learning-rate" in raised.value.remedy
    name_of_class = LossNotFiniteError("the loss is nan", remedy="", examples=[10_000, 0])
    with (
        pytest.raises(LossNotFiniteError, match="in a batch with texts such as"),
        failures_explained(RunFolder(tmp_path), inputs),
    ):
        raise name_of_class


def test_stages_start_and_end_in_order(tiny_folder: Path, tmp_path: Path) -> None:
    emitted: list[Event] = []
    run_tiny(tmp_path / "run", model=tiny_folder, max_steps=1, emit=emitted.append)
    stages = [event for event in emitted if isinstance(event, Stage)]
    started = [stage.name for stage in stages if stage.seconds is None]
    assert " ".join(started) == "data model tokenize features train saving test words report"
    assert [stage.name for stage in stages if stage.seconds is not None] == started


def test_error_about_another_file_does_not_mention_the_run_folder(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs, full = prepare_tiny(tiny_folder), OSError(errno.ENOSPC, "full", "/elsewhere/file")
    with (
        pytest.raises(FinetuneError, match="/elsewhere/file: full"),
        failures_explained(RunFolder(tmp_path), inputs),
    ):
        raise full
