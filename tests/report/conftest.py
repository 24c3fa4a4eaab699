"""The results of a run that never was."""

import pytest

from finetune.model.mode import Mode
from finetune.runs.results import RunFacts, RunResults, TrainingMetrics
from finetune.tasks.single import ClassScores, Single, SingleScores


@pytest.fixture
def results() -> RunResults:
    """A run of two classes, one of whose four test rows is misclassified."""
    per_class = {
        "DESC": ClassScores(precision=0.667, recall=1.0, f1=0.8, support=2),
        "a|b\n<i>": ClassScores(precision=1.0, recall=0.5, f1=0.667, support=2),
    }
    validation = SingleScores(
        samples=4, loss=0.4, accuracy=0.875, macro_f1=0.87, per_class=per_class, confusion_matrix=[]
    )
    test = SingleScores(
        samples=4,
        loss=0.5,
        accuracy=0.75,
        macro_f1=0.7333,
        per_class=per_class,
        confusion_matrix=[[2, 0], [1, 1]],
    )
    facts = RunFacts(
        data="trec",
        class_names=["DESC", "a|b\n<i>"],
        model="bert-base-uncased",
        mode=Mode("head"),
        device="cpu",
        device_description="a slow CPU",
        precision="fp32",
        precision_timing=None,
        trained_parameters=770,
        total_parameters=109_483_778,
        real_token_share=0.9,
    )
    training = TrainingMetrics(
        epoch=3.0,
        train_samples=4906,
        train_runtime=83.2,
        train_samples_per_second=176.9,
        train_steps_per_second=5.5,
        train_loss=0.7,
        train_batch_size=32,
        train_peak_bytes=None,
    )
    return RunResults(
        Single(["DESC", "a|b\n<i>"]), facts, training, validation, test, output_dir="runs/my-run"
    )
