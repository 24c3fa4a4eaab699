"""Estimates a baseline for a table: a cross-validated linear head on the frozen encoder.

``--freeze-core`` fits the same head, and a run with this option reuses the features.
"""

from dataclasses import dataclass, replace

from datasets import Dataset, DatasetDict

from finetune.config.schema import MAX_ESTIMATED_ROWS, Config, TrainingConfig
from finetune.data.dataset import LoadedData, column_of, rows_where, sample_rows
from finetune.devices.base import move_to_device
from finetune.devices.select import select_device
from finetune.errors import FinetuneError, ModelUnsupportedError
from finetune.evaluation.predict import Predictor
from finetune.evaluation.statistics import bootstrap, metric_interval
from finetune.events import Info, emit, muted
from finetune.model.source import is_available_locally
from finetune.model.structure import encoder_layers
from finetune.runs.batch_sizes import make_batch_sizes
from finetune.runs.features import stored_features
from finetune.runs.linear_head import read_features
from finetune.runs.plan import make_plan
from finetune.runs.prepare import RunInputs, choose_method, encode_rows, load_for_training
from finetune.tasks.base import Labels, Task
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import MetricValue
from finetune.training.linear_head import (
    LabelledFeatures,
    choose_inverse_regularization,
    cross_validate,
)

# With fewer rows, a fold would have only one or two rows.
MIN_ROWS = 10
MAX_ROWS = 2_000
# Layer parameters times tokens: about 15 s on two CPU cores.
MAX_WORK = 5e11
RESAMPLES = 500
# All other options only affect gradient descent.
KEPT_OPTIONS = ("device", "precision", "eval_batch_size", "class_weights", "seed")


@dataclass(frozen=True)
class BaselineEstimate:
    """A metric with its 95% interval, cross-validated on ``sampled`` of the training rows.

    ``baseline`` is the metric of a constant prediction, ``method`` how ``finetune run`` trains.
    """

    rows: int
    sampled: int
    classes: int
    metric: str
    value: float
    low: float
    high: float
    baseline: float
    method: str

    @property
    def lines(self) -> list[str]:
        """The sentences that are printed."""
        metric, limits = METRICS[self.metric], (self.low, self.high)
        baseline = f"always predicting the {metric.baseline}"
        if metric.baseline == "largest class":
            baseline = "majority-class baseline"
        interval = "–".join(f"{limit:.2g}" for limit in limits)
        if metric.is_fraction:
            interval = "{:.0f}–{:.0f}%".format(*(100 * limit for limit in limits))
        classes = f", {self.classes} classes" * (self.classes > 0)
        sample = f" on {self.sampled:,} of them" * (self.sampled < self.rows)
        return [
            f"{self.rows:,} training rows{classes}: a linear head on the frozen encoder, "
            f"cross-validated{sample}: {metric.sentence.format(interval)} "
            f"({baseline}: {MetricValue(metric, self.baseline)})",
            f"training method of finetune run: {self.method}",
        ]


def expect(config: Config, rows: Dataset, task: Task) -> BaselineEstimate | None:
    """Cross-validate a linear head on training rows; None for a large table or without weights."""
    name, reason = config.model.model, ""
    if len(rows) > MAX_ESTIMATED_ROWS:
        return None
    try:
        if len(rows) < MIN_ROWS:
            reason = f"{len(rows)} training rows are too few"
        elif not is_available_locally(name, revision=config.model.revision):
            reason = f"the weights of {name} are not on this machine; finetune run downloads them"
        else:
            emit(Info(f"estimating a baseline with {name}"))
            with muted():
                return _cross_validate(config, rows, task)
    except FinetuneError as error:
        reason = error.message
    emit(Info(f"no baseline estimate: {reason}"))
    return None


def _cross_validate(config: Config, rows: Dataset, task: Task) -> BaselineEstimate:
    is_balanced, count = config.training.class_weights == "balanced", len(rows)
    task = task.with_loss(_labels(rows, task), is_balanced=is_balanced)
    method = choose_method(config, task, rows=count)
    features = read_frozen_features(prepare_head(config, rows, task))
    seed = config.training.seed
    chosen, logits = choose_inverse_regularization(features, seed=seed)
    if logits is None:
        logits = cross_validate(features, [chosen], seed=seed)[chosen]
    labels, sampled = features.labels, len(features.labels)
    scores = task.score(logits, labels)
    metric = next(iter(scores.baselines))
    value = scores.metrics[metric]
    compute = task.weighted_metrics(task.prediction_rows(logits, labels))
    drawn = bootstrap(compute, rows=sampled, resamples=RESAMPLES)[metric]
    interval = metric_interval(METRICS[metric], value, sampled, drawn)
    return BaselineEstimate(
        rows=count,
        sampled=sampled,
        classes=len(task.class_names),
        metric=metric,
        value=value,
        low=interval.low,
        high=interval.high,
        baseline=scores.baselines[metric],
        method=method.reason or f"plain fine-tuning, mode {config.model.mode}",
    )


def prepare_head(config: Config, rows: Dataset, task: Task, *, samples: bool = True) -> RunInputs:
    """Prepare a run with ``--freeze-core`` on a sample that takes a few seconds."""
    options = {name: getattr(config.training, name) for name in KEPT_OPTIONS}
    model = replace(config.model, freeze_core=True, head="whole", train_layers=None)
    if model.long_texts == "windows":
        model = replace(model, long_texts="truncate")
    training = TrainingConfig(check_device=False, **options)
    config = replace(config, model=model, training=training)
    device = select_device(training.device)
    method = choose_method(config, task, rows=len(rows))
    with muted():
        text_model, method = load_for_training(config, method, task=task)
    if not method.fits_head:
        raise ModelUnsupportedError("its head has new layers beneath the output layer", remedy="")
    layers = encoder_layers(text_model.model).parameters()
    parameters, limit = sum(parameter.numel() for parameter in layers), MAX_ROWS
    while True:
        if samples and len(rows) > limit:
            strata = task.strata(_labels(rows, task))
            rows = rows_where(rows, sample_rows(strata, rows=limit, seed=config.data.split_seed))
        examples = encode_rows(rows, "train", text_model, config=config)
        work = parameters * float(examples.lengths.mean())
        limit = max(int(MAX_WORK / work), MIN_ROWS) if device.is_reference else limit
        if not samples or len(rows) <= limit:
            break
    data = LoadedData(DatasetDict(train=rows), task)
    return RunInputs(config, device, data, {"train": examples}, text_model, method)


def read_frozen_features(inputs: RunInputs) -> LabelledFeatures:
    """Return the features of training rows, read from the store or added to it."""
    device = inputs.device
    with muted():
        plan = make_plan(inputs)
        _, batch_size = make_batch_sizes(inputs, plan)
    device.choose_attention(longest_tokens=plan.padded_lengths[-1])
    model, splits = stored_features(inputs, plan, batch_size)
    move_to_device(model, device.torch_device)
    predictor = Predictor(model, device, plan.precision, batch_size)
    return read_features(inputs, plan, predictor, splits["train"])


def _labels(rows: Dataset, task: Task) -> Labels:
    return task.labels(column_of(rows, "label"))
