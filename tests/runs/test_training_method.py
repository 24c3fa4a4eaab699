"""The choice of the training method."""

from dataclasses import replace
from typing import Any

import pytest

from finetune import distributed
from finetune.config.schema import Config, ModelConfig, TrainingConfig
from finetune.errors import ConfigurationError
from finetune.runs.prepare import MAX_ROWS_PER_CLASS, choose_method
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.training.plan import TrainingMethod

TASK = Single(class_names=["no", "yes"])


def choose(*, rows: int = 20, **options: Any) -> TrainingMethod:
    """Return the training method of a configuration for two classes."""
    model = {name: options.pop(name) for name in [*options] if hasattr(ModelConfig, name)}
    config = replace(
        Config(), model=replace(ModelConfig(), **model), training=TrainingConfig(**options)
    )
    return choose_method(config, TASK, rows=rows)


def test_few_rows_per_class_get_contrastive_training_and_a_linear_head() -> None:
    method = choose(rows=20)

    assert method.is_contrastive
    assert method.fits_head
    assert method.reason.endswith("only 10 rows per class")


def test_many_rows_a_class_take_plain_steps() -> None:
    assert choose(rows=2 * MAX_ROWS_PER_CLASS).is_contrastive
    assert choose(rows=2 * MAX_ROWS_PER_CLASS + 2) == TrainingMethod()
    assert choose(rows=10_000, contrastive="on").is_contrastive


def test_a_linear_head_is_fitted_on_a_frozen_encoder_whatever_the_rows() -> None:
    for mode in ({"freeze_core": True}, {"head": "classifier"}):
        method = choose(rows=100_000, **mode)
        assert method.fits_head
        assert not method.is_contrastive


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
def test_who_asks_for_steps_or_for_what_no_linear_head_can_do_gets_steps(
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


def test_smoothed_labels_take_plain_steps_where_the_encoder_trains() -> None:
    assert choose(label_smoothing=0.1) == TrainingMethod()
    assert choose(label_smoothing=0.1, freeze_core=True).fits_head


def test_regression_takes_plain_steps_and_its_linear_head_is_fitted() -> None:
    config = Config()
    assert choose_method(config, Regression(), rows=20) == TrainingMethod()
    frozen = replace(config, model=replace(config.model, freeze_core=True))
    assert choose_method(frozen, Regression(), rows=20).fits_head
