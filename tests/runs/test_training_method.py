"""The choice of the training method."""

from dataclasses import replace
from typing import Any

import pytest

from finetune import distributed
from finetune.config.schema import Config, ModelConfig, TrainingConfig
from finetune.errors import ConfigurationError
from finetune.runs.prepare import MAX_ROWS_PER_CLASS, choose_method
from finetune.tasks.base import Task
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.training.plan import TrainingMethod

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
    ],
    ids=str,
)
def test_the_method_depends_on_rows_mode_and_task(
    options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    method = choose(**options)
    assert (method.fits_head, method.is_contrastive) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e-3},
        {"num_train_epochs": 5.0},
        {"max_steps": 10},
        {"fit_head": "off"},
        {"loss": "focal"},
    ],
)
@pytest.mark.parametrize("mode", [{}, {"freeze_core": True}])
def test_options_of_gradient_descent_select_it(
    mode: dict[str, Any], options: dict[str, Any]
) -> None:
    assert choose(**mode, **options) == TrainingMethod()


@pytest.mark.parametrize("mode", [{}, {"freeze_core": True}])
def test_several_ranks_take_plain_steps(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "_current", distributed.Launch(0, 2))
    assert choose(**mode) == TrainingMethod()
    for option in ("contrastive", "fit_head"):
        with pytest.raises(ConfigurationError, match="2 processes"):
            choose(freeze_core=option == "fit_head", **{option: "on"})
