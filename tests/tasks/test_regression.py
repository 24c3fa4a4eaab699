from typing import Any

import numpy as np
import pytest

from finetune.config.schema import TrainingConfig
from finetune.errors import ConfigurationError
from finetune.tasks.regression import Regression

VALUES = np.array([1, 3], np.float32)


def test_loss_standardizes_with_training_mean_and_deviation() -> None:
    task = Regression().with_loss(VALUES, TrainingConfig(seed=1))
    assert (task.mean, task.deviation) == (2.0, 1.0)


@pytest.mark.parametrize(
    "options", [{"class_weights": "balanced"}, {"loss": "focal"}, {"label_smoothing": 0.1}]
)
def test_classification_loss_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="only apply to classification"):
        Regression().with_loss(VALUES, TrainingConfig(**options))
