from typing import Any

import numpy as np
import pytest

from finetune.config.schema import TrainingConfig
from finetune.errors import ConfigurationError
from finetune.tasks.regression import Regression

VALUES = np.array([1, 3], np.float32)


def test_the_loss_reads_mean_and_deviation_of_the_training_rows() -> None:
    task = Regression().with_loss(VALUES, TrainingConfig(seed=1))
    assert (task.mean, task.deviation) == (2.0, 1.0)


@pytest.mark.parametrize(
    "options", [{"class_weights": "balanced"}, {"loss": "focal"}, {"label_smoothing": 0.1}]
)
def test_options_of_the_loss_for_classes_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="only apply to classification"):
        Regression().with_loss(VALUES, TrainingConfig(**options))
