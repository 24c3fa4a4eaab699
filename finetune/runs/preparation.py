"""Prepares device, data and model once for all runs of one configuration."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune import distributed
from finetune.config.mode import Mode
from finetune.config.schema import OPTIONS, Config, Pooling, change_options
from finetune.data import is_waiting
from finetune.data.dataset import LoadedData, column_of
from finetune.data.load import KNOWN_BY_NAME, load_splits
from finetune.data.split import split_fold
from finetune.devices.base import Device
from finetune.devices.select import check_precision, select_device
from finetune.errors import UsageError
from finetune.events import Info, WarningMessage, emit, stage
from finetune.model.freeze import (
    count_parameters,
    enable_gradient_checkpointing,
    set_trainable,
    trainable_parameter_names,
)
from finetune.model.load import TextModel, load_pretrained
from finetune.model.lora import add_adapters, require_peft
from finetune.model.mean_pooling import mean_pooling_unsupported_error, pass_through_head
from finetune.model.source import MINILM
from finetune.model.tensor_store import cache_folder
from finetune.runs.encoding import encode_rows
from finetune.runs.folder import RunFolder
from finetune.runs.plan import choose_method, plan_training
from finetune.runs.results import AutoTunedOption, RunDetails, RunFacts, TextLengths
from finetune.runs.tracking import check_report_to
from finetune.tasks.base import Task
from finetune.tasks.metrics import choose_metric
from finetune.tokenization.examples import Examples
from finetune.training.contrastive import TEXTS_PER_STEP
from finetune.training.plan import Plan, TrainingMethod
from finetune.training.precision import check_speed, choose_precision

# Set by ``accelerate launch``. Each process of a run has the whole model.
_SPLIT_MODELS = tuple(f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"))
# Options that token ids depend on.
_READING = {"model", "revision", "max_length", "long_texts", "stride"}


@dataclass(frozen=True)
class Preparation:
    """Device, data, the splits as token ids, and a pretrained model with a new head, on the CPU.

    Training changes the model. ``option_sources`` has the file, variable or flag of each option
    that was set, ``choices`` the options chosen by measurement. In a cross-validation, ``pool`` has
    the examples of all folds, and ``rows`` the row numbers of each split.
    """

    config: Config
    device: Device
    data: LoadedData
    examples: Mapping[str, Examples]
    text_model: TextModel
    method: TrainingMethod
    option_sources: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[AutoTunedOption] = ()
    pool: Examples | None = None
    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task: what the labels are."""
        return self.text_model.task

    @property
    def mode(self) -> Mode:
        """Which layers are trained."""
        return self.config.model.mode

    @cached_property
    def plan(self) -> Plan:
        """The steps of a run."""
        return plan_training(self.config, self.examples, self.text_model, self.device, self.method)

    @property
    def resolved_config(self) -> Config:
        """All options, to repeat the same run from any folder.

        It has the values of all defaults, absolute paths, and the commits of data and model.
        """
        config = self.config
        data, model = config.data.data, config.model.model
        if data not in KNOWN_BY_NAME:
            commit = next((source.commit for source in self.data.sources if source.commit), None)
            data = f"{data.partition('@')[0]}@{commit}" if commit else _absolute(data)
        paths = {one.name: one.value_in(config) for one in OPTIONS.values() if one.is_path}
        pinned: dict[str, Any] = {
            **{option: path and _absolute(path) for option, path in paths.items()},
            **self._pinned_steps(),
            "data": data,
            "model": model if model == MINILM else _absolute(model),
            "revision": self.text_model.source.commit,
            "pooling": self.text_model.pooling,
            "lora_alpha": config.model.lora and config.model.lora.alpha,
            "gradient_checkpointing": bool(config.training.gradient_checkpointing),
            "contrastive": "on" if self.method.is_contrastive else "off",
            "fit_head": "on" if self.method.fits_head else "off",
            "output_dir": None,
            "overwrite": False,
        }
        return change_options(config, pinned)

    def keeping_tables(self, folder: RunFolder) -> "Preparation":
        """Return a preparation in which tables in memory are files of the run folder."""
        options = {name: option.value_in(self.config) for name, option in OPTIONS.items()}
        waiting = {name: Path(path) for name, path in options.items() if is_waiting(path)}
        if not waiting:
            return self
        folder.tables = sorted({*waiting.values()})
        kept = {str(path): str(folder.path.resolve() / path.name) for path in folder.tables}
        config = change_options(self.config, {name: kept[options[name]] for name in waiting})
        sources = [replace(one, name=kept.get(one.name, one.name)) for one in self.data.sources]
        return replace(self, config=config, data=replace(self.data, sources=sources))

    def _pinned_steps(self) -> dict[str, Any]:
        """Return the options of gradient descent; a fitted head has none."""
        plan, rate = self.plan, {"learning_rate": self.plan.peak}
        if plan.method.fits_head:
            return rate if plan.method.is_contrastive else {}
        names = ("num_train_epochs", "head_lr_multiplier", "weight_decay", "effective_batch_size")
        pinned = {name: getattr(plan, name) for name in names}
        return {**pinned, **rate, "early_stopping_patience": plan.patience}

    @property
    def facts(self) -> RunFacts:
        """Return a description of model, data and device."""
        reasons = {choice.subject: choice.note for choice in self.choices}
        trained, total = count_parameters(self.text_model.model.parameters())
        return RunFacts(
            data=self.config.data.data,
            class_names=list(self.task.class_names),
            model=self.config.model.model,
            mode=self.mode,
            device=self.device.name,
            device_description=self.device.description,
            precision=self.config.training.precision,
            precision_reason=reasons.get("precision"),
            trained_parameters=trained,
            total_parameters=total,
            real_token_share=self.plan.real_token_fraction(self.examples["train"]),
        )

    @property
    def details(self) -> RunDetails:
        """What a report shows about a run in addition to its metrics."""
        options = self.config.training
        return RunDetails(
            choices=list(self.choices),
            lengths={split: _text_lengths(each) for split, each in self.examples.items()},
            class_rows=self.task.count_classes(self.examples["train"].labels),
            metric_for_best_model=choose_metric(
                options.metric_for_best_model, self.task.problem_type
            ).name,
            is_balanced=options.class_weights == "balanced",
        )

    def with_choices(self, *choices: AutoTunedOption) -> "Preparation":
        """Return the same with more options that were chosen by measurement."""
        by_subject = {choice.subject: choice for choice in (*self.choices, *choices)}
        return replace(self, choices=[*by_subject.values()])

    def with_precision(self) -> "Preparation":
        """Return the same with fp32 or bf16 in place of ``auto``."""
        if self.config.training.precision != "auto":
            return self
        hidden_size = self.text_model.model.config.hidden_size
        cache = cache_folder(self.config.cache, "precision")
        choice = distributed.broadcast(
            lambda: choose_precision(self.device, hidden_size=hidden_size, cache=cache)
        )
        emit(Info(f"precision: {choice.precision}, as {choice.reason}; --precision sets another"))
        option = AutoTunedOption(
            "precision",
            choice.precision,
            "ms for one encoder layer",
            choice.milliseconds,
            choice.reason,
        )
        config = change_options(self.config, {"precision": choice.precision})
        return replace(self, config=config).with_choices(option)

    def with_seed(self, seed: int) -> "Preparation":
        """Return the same data with the pretrained model and a new head for another seed."""
        config = change_options(self.config, {"seed": seed})
        text_model, method = load_for_training(
            config, self.method, task=self.task, device=self.device
        )
        return replace(self, config=config, text_model=text_model, method=method)

    def with_options(self, changes: Mapping[str, Any]) -> "Preparation":
        """Return the same rows with other options of training and model."""
        examples = {} if changes.keys() & _READING else self.examples
        return _prepare_model(
            change_options(self.config, changes), self.device, self.data, examples,
            self.option_sources)  # fmt: skip

    def with_fold(self, fold: int) -> "Preparation":
        """Return splits of the training rows, tested on a fold, with the pretrained model."""
        data, pool = self.data, self.examples["train"]
        splits = split_fold(data.splits["train"], fold, self.config.data, task=data.task)
        rows = {name: column_of(split, "row").to_numpy() for name, split in splits.items()}
        own = replace(
            self,
            data=replace(data, splits=splits),
            examples={name: pool.select(numbers) for name, numbers in rows.items()},
            pool=pool,
            rows=rows,
        )
        return own.with_seed(self.config.training.seed)


def prepare(
    config: Config, *, option_sources: Mapping[str, str] | None = None, folds: int | None = None
) -> Preparation:
    """Select the device, load the data and the model, and encode the texts."""
    check_report_to(config)
    _check_model_is_whole()
    if config.model.lora:
        require_peft()
    device, precision = select_device(config.training.device), config.training.precision
    check_precision(device, precision)
    if config.training.check_device is not False:
        check_speed(device, precision)
    distributed.use_device(device)
    count = distributed.world_size()
    several = f", {count} processes" if count > 1 else ""
    emit(Info(f"device: {device.name} ({device.description}){several}, precision {precision}"))
    with stage("data"):
        data = load_splits(config.data, folds=folds)
    sources = option_sources or {}
    return _prepare_model(config, device, data, {}, sources)


def _prepare_model(
    config: Config,
    device: Device,
    data: LoadedData,
    examples: Mapping[str, Examples],
    option_sources: Mapping[str, str],
) -> Preparation:
    """Load the model, and encode the texts unless they are encoded already."""
    training, labels = config.training, data.task.labels(column_of(data.splits["train"], "label"))
    task = data.task.with_loss(
        labels,
        is_balanced=training.class_weights == "balanced",
        focal_gamma=training.focal_gamma if training.loss == "focal" else 0.0,
        label_smoothing=training.label_smoothing,
    )
    choose_metric(training.metric_for_best_model, task.problem_type)
    method = choose_method(config, task, rows=len(labels))
    with stage("model"):
        text_model, method = load_for_training(config, method, task=task, device=device)
    # The manifest needs the digest, which takes half a second for BERT-base.
    _ = text_model.source.weights_digest
    if method.is_contrastive and "batch_size" not in option_sources:
        # Each text is only contrasted with the texts of its micro-batch.
        config = change_options(config, {"batch_size": TEXTS_PER_STEP})
    if config.data.unlabeled not in (None, "none") and not method.is_contrastive:
        message = "--unlabeled is not used: only contrastive training learns from unlabeled texts"
        emit(WarningMessage(message, remedy="leave it out, or add --contrastive on"))
    with stage("tokenize"):
        encode = partial(encode_rows, config=config)
        examples = {
            name: replace(examples[name], weights=task.example_weights(examples[name].labels))
            if name in examples
            else encode(rows, name, text_model)
            for name, rows in data.splits.items()
        }
    return Preparation(config, device, data, examples, text_model, method, option_sources)


def load_for_training(
    config: Config, method: TrainingMethod, *, task: Task, device: Device
) -> tuple[TextModel, TrainingMethod]:
    """Load the pretrained model with a new head, and freeze the layers that are not trained.

    A training method that the model does not allow is replaced by plain steps.
    """
    # With many rows, mean pooling gains little in fine-tuning, and its layer takes time. A LoRA
    # adapter has to fit the plain pretrained model.
    is_mean = method.fits_head and config.model.pooling == "auto" and not config.model.lora
    pooling: Pooling = "mean" if is_mean else config.model.pooling
    seed = config.training.seed
    text_model = load_pretrained(config.model, task, seed=seed, pooling=pooling)
    if config.model.pooling == "mean" and text_model.pooling != "mean":
        raise mean_pooling_unsupported_error(text_model.model)
    if is_mean and text_model.pooling != pooling:
        emit(Info(f"pooling: cls, as {mean_pooling_unsupported_error(text_model.model).message}"))
    mode, structure = config.model.mode, text_model.structure
    trained = trainable_parameter_names(structure, mode=mode)
    if method.fits_head:
        new_layers = structure.new - structure.output_layer
        passes = not new_layers and text_model.pooling == "cls"
        passes = passes or pass_through_head(text_model.model, structure)
        if not passes and new_layers and not method.is_contrastive:
            emit(Info("gradient descent trains the head: layers below its output layer are new"))
            method = TrainingMethod()
        elif method.is_contrastive:
            # Without gradients of the embeddings a step takes two thirds of the time, for the same
            # accuracy.
            frozen = structure.embeddings | (structure.head if passes else frozenset())
            trained = trained - frozen | structure.output_layer
        else:
            trained = structure.output_layer
    if method.reason:
        emit(Info(f"training method: {method.reason}"))
    if lora := config.model.lora:
        adapted = add_adapters(text_model.model, structure, lora, mode=mode)
        trained, structure = trained | adapted.adapters, adapted
        text_model = replace(text_model, structure=structure)
        if structure.mean_layer:
            message = "the head reads the mean of the tokens, which the pretrained model's does not"
            emit(Info(f"only the merged model is saved, and no adapter: {message}"))
    set_trainable(text_model.model, trained, structure)
    count, total = count_parameters(text_model.model.parameters())
    counts = f"{count:,} of {total:,} parameters train ({count / total:.1%})"
    emit(Info(f"model: {config.model.model}, mode {mode}, {counts}"))
    if config.training.gradient_checkpointing:
        enable_gradient_checkpointing(text_model.model, device)
    return text_model, method


def _text_lengths(examples: Examples) -> TextLengths:
    lengths = examples.lengths
    median, p95 = np.percentile(lengths, (50, 95)).tolist()
    windows = len(lengths) if examples.windows else None
    texts, cut = len(examples.labels), examples.truncated_texts
    return TextLengths(texts, windows, cut, median, p95, int(lengths.max()))


def _absolute(source: str) -> str:
    """Return the absolute path of a file or folder; anything else, such as a Hub id, as it is."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _check_model_is_whole() -> None:
    """Raise ``UsageError`` if the user has configured Accelerate to split the model."""
    for name in _SPLIT_MODELS:
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise UsageError(
                f"Accelerate is configured to split the model ({name}), which a run does not do",
                remedy="choose multi-GPU or multi-CPU with accelerate config, or use torchrun",
            )
