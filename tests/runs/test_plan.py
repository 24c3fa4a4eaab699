"""The training method of a run, its steps and its resolved options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prepared_runs import prepare_tiny

from finetune import distributed
from finetune.config.schema import Config, ModelConfig, TrainingConfig
from finetune.errors import ConfigurationError
from finetune.runs.plan import make_plan
from finetune.runs.prepare import MAX_ROWS_PER_CLASS, choose_method
from finetune.tasks.base import Task
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.training.plan import TrainingMethod


@pytest.mark.parametrize(
    ("options", "steps_per_epoch", "total_steps"),
    [
        ({"max_steps": 3}, 4, 3),
        ({"max_steps": 10}, 4, 10),
        ({"num_train_epochs": 1.3}, 4, 6),
        ({"effective_batch_size": 64}, 1, 2),
        ({"batch_size": 100}, 1, 2),
        ({"max_train_samples": 33, "num_train_epochs": 1}, 3, 3),
    ],
)
def test_steps_depend_on_epochs_rows_and_max_steps(
    options: dict[str, Any], steps_per_epoch: int, total_steps: int, tiny_folder: Path
) -> None:
    inputs = prepare_tiny(tiny_folder, **options)
    plan, examples = make_plan(inputs), inputs.examples["train"]
    batches = plan.batches(examples, epoch=0)
    assert plan.steps_per_epoch == len(batches) == steps_per_epoch
    assert plan.total_steps == total_steps
    assert max(len(batch.indices) for batch in batches) <= plan.examples_per_step
    assert sum(len(batch.indices) for batch in batches) == len(examples.lengths)
    tokens = sum(len(batch.indices) * batch.padded_length for batch in batches)
    assert plan.real_token_fraction(examples) == examples.lengths.sum() / tokens


def test_saved_config_contains_resolved_defaults(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    # The name of a source is used even if a folder has the same name.
    Path("questions").mkdir(exist_ok=True)
    inputs = prepare_tiny(
        Path(tiny_folder.name), learning_rate=None, num_train_epochs=None, freeze_core=True,
        cache_dir=".", output_dir="run", overwrite=True, fit_head="off", validation_fraction=0.1,
    )  # fmt: skip
    config = make_plan(inputs).config
    training = config.training
    assert (training.learning_rate, training.num_train_epochs) == (5e-4, 100.0)
    assert (training.early_stopping_patience, training.weight_decay) == (30, 0.0)
    assert training.effective_batch_size == 16
    assert config.data.data == "questions"
    assert config.model.model == str(tiny_folder)
    assert config.cache.cache_dir == str(tiny_folder.parent)
    assert (config.output.output_dir, config.output.overwrite) == (None, False)


TASK = Single(class_names=["no", "yes"])


def choose(*, rows: int = 20, task: Task = TASK, **options: Any) -> TrainingMethod:
    """Return the training method of a configuration for two classes."""
    model = {name: options.pop(name) for name in [*options] if hasattr(ModelConfig, name)}
    config = replace(
        Config(), model=replace(ModelConfig(), **model), training=TrainingConfig(**options)
    )
    return choose_method(config, task, rows=rows)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (True, True)),
        ({"rows": 2 * MAX_ROWS_PER_CLASS}, (True, True)),
        ({"rows": 2 * MAX_ROWS_PER_CLASS + 2}, (False, False)),
        ({"rows": 10_000, "contrastive": "on"}, (True, True)),
        ({"rows": 100_000, "freeze_core": True}, (True, False)),
        ({"rows": 100_000, "head": "classifier"}, (True, False)),
        ({"label_smoothing": 0.1}, (False, False)),
        ({"label_smoothing": 0.1, "freeze_core": True}, (True, False)),
        ({"task": Regression()}, (False, False)),
        ({"task": Regression(), "freeze_core": True}, (True, False)),
        *(
            (options | mode, (False, False))
            for options in (
                {"learning_rate": 1e-3},
                {"num_train_epochs": 5.0},
                {"max_steps": 10},
                {"fit_head": "off"},
                {"loss": "focal"},
            )
            for mode in ({}, {"freeze_core": True})
        ),
    ],
    ids=str,
)
def test_training_method_depends_on_rows_mode_task_and_options(
    options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    method = choose(**options)
    assert (method.fits_head, method.is_contrastive) == expected


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"fit_head": "on", "contrastive": "off"}, "--fit-head"),
        ({"fit_head": "on", "task": Regression()}, "--fit-head"),
        ({"fit_head": "on", "label_smoothing": 0.1}, "--fit-head"),
        ({"fit_head": "on", "loss": "focal", "freeze_core": True}, "--fit-head"),
        ({"fit_head": "off", "contrastive": "on"}, "--contrastive"),
        ({"contrastive": "on", "task": Regression()}, "--contrastive"),
    ],
    ids=str,
)
def test_option_that_cannot_be_used_suggests_auto(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag} on can't be used") as raised:
        choose(**options)
    assert raised.value.remedy == f"use {flag} auto"


@pytest.mark.parametrize("mode", [{}, {"freeze_core": True}])
def test_several_processes_use_gradient_descent(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_current", distributed.Launch(0, 2))
    assert choose(**mode) == TrainingMethod()
    for option in ("contrastive", "fit_head"):
        with pytest.raises(ConfigurationError, match="2 processes"):
            choose(freeze_core=option == "fit_head", **{option: "on"})
