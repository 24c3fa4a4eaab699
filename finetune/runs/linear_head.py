"""Linear heads on encoder features: the head of a run, and an estimate for a table.

``--freeze-core`` fits the same head as the estimate, and a run with this option reuses the
features.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce

import numpy as np
import pyarrow
from numpy.typing import NDArray
from scipy.special import softmax

from finetune.config.schema import MAX_ESTIMATED_ROWS, Config, TrainingConfig
from finetune.data.dataset import KnownTokens, LoadedData, sample_rows
from finetune.devices.base import move_to_device
from finetune.devices.select import select_device
from finetune.errors import FinetuneError, ModelUnsupportedError
from finetune.evaluation.predict import Predictor
from finetune.evaluation.statistics import Interval, bootstrap, metric_interval
from finetune.events import Info, emit, muted
from finetune.model.load import TextModel
from finetune.model.source import is_available_locally
from finetune.model.structure import encoder_layers
from finetune.runs.features import stored_features
from finetune.runs.plan import make_batch_sizes, make_plan
from finetune.runs.prepare import RunInputs, choose_method, encode_rows, load_for_training
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.labels import HARD, listed
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import MetricValue
from finetune.tokenization.examples import Examples
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    MIN_FITTING_NAMES,
    LabeledFeatures,
    choose_inverse_regularization,
    cross_validate,
    fit_linear_head,
    fit_with_texts,
    mean_by_class,
    names_fit,
)
from finetune.training.loop import TrainingLoop
from finetune.training.plan import Plan, bypass_output_layer, interpolate
from finetune.training.prototypes import Prototypes

# With fewer rows, a fold would have only one or two rows.
MIN_ROWS = 10
MAX_ROWS = 2_000
# Layer parameters times tokens: about 15 s on two CPU cores.
MAX_WORK = 5e11
RESAMPLES = 500
# All other options only affect gradient descent.
KEPT_OPTIONS = ("device", "precision", "eval_batch_size", "class_weights", "seed")


class LinearHeadFitter:
    """Fits the output layer of a model in training.

    ``cross_validated`` contains the logits of the training rows on the frozen encoder, each row
    predicted by a head fitted without it. It is None if validation rows measure the model.
    ``names`` is a field of ``RunDetails``.
    """

    def __init__(self, inputs: RunInputs, trainer: TrainingLoop) -> None:
        self._inputs, self._trainer = inputs, trainer
        is_contrastive, seed = inputs.method.is_contrastive, trainer.plan.seed
        rows = self._read_features("train")
        strength, logits = DEFAULT_INVERSE_REGULARIZATION, None
        if not is_contrastive:
            strength, logits = choose_inverse_regularization(rows, seed=seed)
        # This happens before contrastive training, after which the encoder has seen all labels.
        self.cross_validated: NDArray[np.float32] | None = None
        if is_contrastive or "validation" not in inputs.examples:
            if logits is None:
                logits = cross_validate(rows, [strength], seed=seed)[strength]
            self.cross_validated = logits
        self._inverse_regularization = strength
        self.names = self._add_names(rows) if "names" in trainer.examples else ""
        # Contrastive training changes the features. Keep the pretrained weights for interpolation.
        self._rows = None if is_contrastive else rows
        self._embeddings = ExitStack()
        self._pretrained = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in trainer.trained_parameters().items()
            if is_contrastive
        }

    def _read_features(self, split: str) -> LabeledFeatures:
        trainer = self._trainer
        return read_features(self._inputs, trainer.plan, trainer.predictor, trainer.examples[split])

    def _add_names(self, rows: LabeledFeatures) -> str:
        """Add class names to the training rows if they fit, and return a sentence.

        Descriptions are always added: users write them for this purpose, and they help even where
        few fit (docs/measurements.md#few-labels).
        """
        names, examples = self._read_features("names"), self._trainer.examples
        classes = np.arange(rows.outputs)
        is_label, is_name = rows.labels[:, None] == classes, names.labels[:, None] == classes
        fit = names_fit(mean_by_class(names.features, is_name), rows.features, is_label)
        # A class without rows is known only by its name.
        is_missing = ~is_label.any(axis=0)[names.labels]
        has_descriptions = self._inputs.config.data.class_descriptions is not None
        word = "descriptions" if has_descriptions else "names"
        similar = f"{fit.sum()} of {len(fit)} are most similar to the texts of their class"
        is_used = is_missing
        if has_descriptions or fit.mean() >= MIN_FITTING_NAMES:
            is_used = np.ones_like(is_missing)
            sentence = f"class {word} are training rows: {similar}"
        else:
            remedy = "--class-descriptions describes them better"
            sentence = f"class names are not used: only {similar}; {remedy}"
        added = [examples["names"].select(np.flatnonzero(is_used))] if is_used.any() else []
        if is_missing.any():
            missing = np.unique(names.labels[is_missing])
            names_of = listed([self._inputs.task.class_names[number] for number in missing])
            sentence += f"; without a labeled row, these are known from their {word}: {names_of}"
            if "unlabeled" in examples:
                added.append(self._find_rows(missing, rows, mean_by_class(names.features, is_name)))
        train = reduce(Examples.followed_by, added, examples["train"])
        self._trainer.examples = {**examples, "train": train}
        emit(Info(f"few-shot: {sentence}"))
        return sentence

    def _find_rows(
        self, missing: NDArray[np.int64], rows: LabeledFeatures, names: NDArray[np.float32]
    ) -> Examples:
        """Return the unlabeled texts that most likely belong to classes without labeled rows."""
        texts, examples = self._read_features("unlabeled"), self._trainer.examples["unlabeled"]
        both = np.concatenate([rows.features, texts.features])
        logits = Prototypes.of(names, both, rows.labels).head.logits(texts.features)
        probabilities, predicted = softmax(logits, axis=1), logits.argmax(axis=1)
        count = len(rows.labels) // len(np.unique(rows.labels))
        found = []
        for number in missing:
            candidates = np.flatnonzero(predicted == number)
            best = np.argsort(-probabilities[candidates, number], kind="stable")[:count]
            found.append(candidates[best])
        labels = np.repeat(missing, [*map(len, found)])
        return replace(examples.select(np.concatenate(found)), labels=labels)

    def start(self) -> None:
        """Make the model return embeddings until ``finish``, for contrastive training."""
        if self._rows is None:
            layer = output_layer(self._inputs.text_model)
            self._embeddings.enter_context(bypass_output_layer(self._trainer.model, layer))

    def finish(self) -> float:
        """Interpolate a contrastively trained encoder, then fit the head. Return its loss."""
        self._embeddings.close()
        rows, text_model, texts = self._rows, self._inputs.text_model, None
        if rows is None:
            assert self.cross_validated is not None
            predicted = text_model.task.read_logits(self.cross_validated).predicted
            accuracy = float((predicted == self._inputs.examples["train"].labels).mean())
            interpolate(self._trainer.model, self._pretrained, frozen_accuracy=accuracy)
            rows = self._read_features("train")
            if "unlabeled" in self._trainer.examples:
                texts = self._read_features("unlabeled").features
        head = fit_linear_head(rows, inverse_regularization=self._inverse_regularization)
        if texts is not None:
            plain, head = head, fit_with_texts(rows, texts)
            features = self._read_features("test").features
            classes = [fitted.logits(features).argmax(axis=1) for fitted in (plain, head)]
            changed = float((classes[0] != classes[1]).mean())
            self._trainer.progress.unlabeled = {"texts": len(texts), "changed": changed}
            self.report_unlabeled()
        head.copy_to(text_model.output_parameters)
        return head.loss

    def report_unlabeled(self) -> None:
        """Report the unlabeled texts that the head was fitted on, if any."""
        if unlabeled := self._trainer.progress.unlabeled:
            learned = f"also learned from {unlabeled['texts']:,.0f} unlabeled texts"
            changed = f"changed {unlabeled['changed']:.1%} of the predictions on test rows"
            emit(Info(f"few-shot: the head {learned}, which {changed}"))


class PrototypeFitter:
    """Makes an output layer of class prototypes, from class descriptions and unlabeled texts."""

    def __init__(self, inputs: RunInputs, trainer: TrainingLoop) -> None:
        self._inputs, self._trainer = inputs, trainer

    def start(self) -> None:
        """Do nothing, because there are no training steps."""

    def finish(self) -> float:
        """Set the output layer, which has no loss."""
        trainer, examples = self._trainer, self._trainer.examples
        read = partial(read_features, self._inputs, trainer.plan, trainer.predictor)
        described, texts = read(examples["train"]), read(examples["unlabeled"]).features
        is_class = described.labels[:, None] == np.arange(described.outputs)
        prototypes = Prototypes.of(mean_by_class(described.features, is_class), texts)
        fits = zip(self._inputs.task.class_names, prototypes.names_fit, strict=True)
        trainer.progress.misfits = [name for name, is_similar in fits if not is_similar]
        prototypes.head.copy_to(self._inputs.text_model.output_parameters)
        return prototypes.head.loss


def read_features(
    inputs: RunInputs, plan: Plan, predictor: Predictor, examples: Examples
) -> LabeledFeatures:
    """Compute the output layer inputs of examples, with their labels and weights."""
    task, labels = inputs.task, examples.labels
    with bypass_output_layer(predictor.model, output_layer(inputs.text_model)):
        features = predictor.logits(examples, padded_lengths=plan.padded_lengths)
    outputs = len(task.output_names)
    return LabeledFeatures(
        features, labels, examples.weights, task.losses, outputs, task.strata(labels)
    )


def output_layer(text_model: TextModel) -> str:
    """Return the name of the module that computes the logits."""
    return next(iter(text_model.structure.output_layer)).rpartition(".")[0]


@dataclass(frozen=True)
class LinearHeadEstimate:
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
        """The printed sentences."""
        metric, limits = METRICS[self.metric], (self.low, self.high)
        baseline = f"always predicting the {metric.baseline}"
        if metric.baseline == "largest class":
            baseline = "majority-class baseline"
        interval = "–".join(f"{limit:.2g}" for limit in limits)
        if metric.is_fraction:
            interval = f"{100 * self.low:.0f}–{100 * self.high:.0f}%"
        classes = f", {self.classes} classes" if self.classes else ""
        sample = f" on {self.sampled:,} of them" if self.sampled < self.rows else ""
        return [
            f"{self.rows:,} training rows{classes}: a linear head on the frozen encoder, "
            f"cross-validated{sample}: {metric.sentence.format(interval)} "
            f"({baseline}: {MetricValue(metric, self.baseline)})",
            f"training method of finetune run: {self.method}",
        ]


def estimate_linear_head(
    config: Config, rows: pyarrow.Table, data: LoadedData
) -> LinearHeadEstimate | None:
    """Cross-validate a linear head on training rows.

    Return None for large tables, tables of ``finetune label``, and without labels or weights.
    """
    name, reason = config.model.model, ""
    if len(rows) > MAX_ESTIMATED_ROWS or not data.has_labels:
        return None
    try:
        if len(rows) < MIN_ROWS:
            reason = f"{len(rows)} training rows are too few"
        elif data.drawn is not None:
            reason = f"the training rows were chosen {HARD}"
        elif not is_available_locally(name, revision=config.model.revision):
            reason = f"the weights of {name} are not on this machine; finetune run downloads them"
        else:
            emit(Info(f"estimating the result of a linear head on {name}"))
            with muted():
                return _cross_validate(config, rows, data)
    except FinetuneError as error:
        reason = error.message
    emit(Info(f"no linear-head estimate: {reason}"))
    return None


def _cross_validate(config: Config, rows: pyarrow.Table, data: LoadedData) -> LinearHeadEstimate:
    options, count = TrainingConfig(class_weights=config.training.class_weights), len(rows)
    task = data.task.with_loss(data.task.labels(rows["label"]), options)
    method = choose_method(config, task, rows=count)
    features = read_frozen_features(prepare_head(config, rows, task, known=data.tokens))
    seed = config.training.seed
    chosen, logits = choose_inverse_regularization(features, seed=seed)
    if logits is None:
        logits = cross_validate(features, [chosen], seed=seed)[chosen]
    metric, interval, baseline = measure_first(task, logits, features.labels)
    return LinearHeadEstimate(
        rows=count,
        sampled=len(features.labels),
        classes=len(task.class_names),
        metric=metric,
        **asdict(interval),
        baseline=baseline,
        method=method.reason or f"plain fine-tuning, mode {config.model.mode}",
    )


def measure_first(task: Task, logits: Logits, labels: Labels) -> tuple[str, Interval, float]:
    """Return the first metric with a baseline, its 95% interval on some rows, and the baseline."""
    scores = task.score(logits, labels)
    metric, baseline = next(iter(scores.baselines.items()))
    value, rows, resampled = scores.metrics[metric], len(labels), np.empty(0)
    if not METRICS[metric].is_proportion:
        compute = task.weighted_metrics(task.prediction_rows(logits, labels))
        resampled = bootstrap(compute, rows=rows, resamples=RESAMPLES)[metric]
    return metric, metric_interval(METRICS[metric], value, rows, resampled), baseline


def prepare_head(
    config: Config,
    rows: pyarrow.Table,
    task: Task,
    *,
    samples: bool = True,
    known: KnownTokens | None = None,
) -> RunInputs:
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
            strata = task.strata(task.labels(rows["label"]))
            rows = rows.filter(sample_rows(strata, rows=limit, seed=config.data.split_seed))
        examples = encode_rows(rows, "train", text_model, config=config, known=known)
        work = parameters * float(examples.lengths.mean())
        limit = max(int(MAX_WORK / work), MIN_ROWS) if device.is_reference else limit
        if not samples or len(rows) <= limit:
            break
    data = LoadedData({"train": rows}, task)
    return RunInputs(config, device, data, {"train": examples}, text_model, method)


def read_frozen_features(inputs: RunInputs) -> LabeledFeatures:
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


def read_text_features(inputs: RunInputs, columns: Sequence[Sequence[str]]) -> NDArray[np.float32]:
    """Return the features of other texts, or of two columns of pairs: [texts, hidden].

    They are not stored.
    """
    device, model, text_model = inputs.device, inputs.config.model, inputs.text_model
    with muted():
        plan = make_plan(inputs)
        _, batch_size = make_batch_sizes(inputs, plan)
    encoded = text_model.encode(*columns, max_length=model.max_length, stride=model.window_stride)
    padded_lengths = text_model.padded_lengths(encoded.lengths, device.shapes)
    device.choose_attention(longest_tokens=padded_lengths[-1])
    move_to_device(text_model.model, device.torch_device)
    predictor = Predictor(text_model.model, device, plan.precision, batch_size)
    with bypass_output_layer(text_model.model, output_layer(text_model)):
        return predictor.logits(text_model.inputs(encoded), padded_lengths=padded_lengths)
