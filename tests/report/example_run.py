"""An invented run with everything that a report shows."""

import numpy as np

from finetune.config.modes import Mode
from finetune.config.schema import AutoTunedOption
from finetune.evaluation.statistics import Calibration, Reliability, measure_reliability
from finetune.files import write_json, write_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunDetails, RunFacts, RunResults, TrainingMetrics
from finetune.tasks.scores import ClassScores, Scores
from finetune.tasks.single import Single

OTHER = "a|b\n<i>"
TEXT = "Who is <script>alert('x')</script> & Co ?"
UPDATES = [{"kind": "step", "epoch": step / 20, "loss": 1 / step} for step in (10, 20)]
VALIDATIONS = [
    {"kind": "validation", "epoch": epoch, "eval_accuracy": 0.9, "eval_macro_f1": 0.8}
    for epoch in (1.0, 2.0)
]
DETAILS = RunDetails(
    choices=[AutoTunedOption("precision", "bf16", "ms for one step", {"bf16": 8.0, "fp32": 12.0})],
    lengths={"train": {"texts": 4906, "cut": 10, "longest": 32}},
    class_rows={"DESC": 1162},
    metric_for_best_model="accuracy",
)


def measure(probability: float) -> Reliability:
    return measure_reliability(np.array([probability] * 2), np.array([True, False]))


CALIBRATION = Calibration(temperature=1.7, before=measure(0.9), after=measure(0.6))


def example_results(*, other: str = OTHER) -> RunResults:
    """Return results with two classes and four test rows, one of them misclassified."""
    per_class = {
        "DESC": ClassScores(precision=0.667, recall=1.0, f1=0.8, support=2),
        other: ClassScores(precision=1.0, recall=0.5, f1=0.667, support=2),
    }
    validation = Scores(
        4, {"accuracy": 0.875, "macro_f1": 0.87, "loss": 0.4}, {"accuracy": 0.5}, per_class, []
    )
    test = Scores(
        samples=4,
        metrics={"accuracy": 0.75, "macro_f1": 0.7333, "loss": 0.5},
        baselines={"accuracy": 0.5},
        per_class=per_class,
        confusion_matrix=[[2, 0], [1, 1]],
    )
    facts = RunFacts(
        data="trec",
        class_names=["DESC", other],
        model="bert-base-uncased",
        mode=Mode("head"),
        device="cpu",
        device_description="a slow CPU",
        precision="fp32",
        precision_reason=None,
        trained_parameters=770,
        total_parameters=109_483_778,
        real_token_share=0.9,
    )
    training = TrainingMetrics(
        epoch=2.0,
        global_step=40,
        max_steps=60,
        best_global_step=20,
        train_samples=4906,
        train_runtime=83.2,
        train_samples_per_second=176.9,
        train_steps_per_second=5.5,
        train_loss=0.7,
        train_batch_size=32,
        train_peak_bytes=None,
    )
    return RunResults(
        Single(["DESC", other]), facts, training, validation, test, "runs/my-run", DETAILS,
        validation_kind="held out",
    )  # fmt: skip


def write_example_run(
    folder: RunFolder, *, text: str = TEXT, other: str = OTHER, column: str = "<b>.csv"
) -> None:
    """Write the run files that the report reads."""
    folder.path.mkdir()
    config = {"data": {"data": "trec", "text_column": column}, "model": {"model": "minilm"}}
    write_json(folder.config_file, config | {"training": {"learning_rate": 1e-4}})
    environment = {"python": "3.11.7", "packages": {"torch": "2.13.0"}}
    write_json(folder.environment_file, environment | {"origins": {"model": "--model"}})
    write_jsonl(folder.metrics_file, UPDATES + VALIDATIONS)
    write_predictions(
        folder,
        ("What is a tsetse fly ?", "DESC", "DESC", 0.9),
        ("What is an atom ?", "DESC", "DESC", 0.9),
        ("Who was Galileo ?", other, other, 0.8),
        (text, other, "DESC", 0.7),
    )


def write_predictions(folder: RunFolder, *rows: tuple[str, str, str, float]) -> None:
    """Write predictions of test rows: text, true class, predicted class, probability."""
    names = ("text", "label", "predicted", "probability")
    write_jsonl(folder.predictions_file, [dict(zip(names, row, strict=True)) for row in rows])
