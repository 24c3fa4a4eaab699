"""Prepares device, data and model once for all runs of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from finetune import distributed
from finetune.config.modes import Mode
from finetune.config.schema import OPTIONS, Config, Pooling, TrainingConfig, change_options, flag_of
from finetune.data import is_waiting
from finetune.data.check import BALANCE, check_splits, suggest_changes, suggest_model
from finetune.data.dataset import (
    KnownTokens,
    LoadedData,
    Splits,
    make_dataset,
    return_freed_memory,
    split_fold,
    texts_of,
)
from finetune.data.load import load_splits, with_few_label_texts
from finetune.devices.base import Device
from finetune.devices.select import check_precision, select_device
from finetune.errors import ConfigurationError
from finetune.events import Info, WarningMessage, emit, stage
from finetune.model.load import TextModel, load_pretrained
from finetune.model.lora import add_adapters, require_peft
from finetune.model.mean_pooling import mean_pooling_unsupported_error, pass_through_head
from finetune.model.structure import count_parameters, set_trainable, trainable_parameter_names
from finetune.runs.folder import RunFolder
from finetune.runs.guess import MAX_ROWS_PER_CLASS
from finetune.runs.journal import check_report_to
from finetune.tasks.base import Task
from finetune.tasks.metrics import choose_metric, user_metrics
from finetune.tokenization.examples import Examples
from finetune.training.linear_head import MAX_TEXTS
from finetune.training.plan import TrainingMethod
from finetune.training.precision import check_speed

# Options that token IDs depend on.
_TOKENIZER_OPTIONS = ("model", "revision", "max_length", "long_texts", "stride")


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run: options, device, data, token IDs by split, and a model with a new head.

    Training changes the model, which is on the CPU at first. ``sources`` contains the file,
    variable or flag of each set option. In a cross-validation, ``pool`` contains the examples of
    all folds.
    """

    config: Config
    device: Device
    data: LoadedData
    examples: Mapping[str, Examples]
    text_model: TextModel
    method: TrainingMethod
    sources: Mapping[str, str] = field(default_factory=dict)
    pool: Examples | None = None

    @property
    def task(self) -> Task:
        """The task type with its labels."""
        return self.text_model.task

    @property
    def mode(self) -> Mode:
        """Which parameters are trained."""
        return self.config.model.mode


def prepare(
    config: Config,
    *,
    sources: Mapping[str, str] | None = None,
    folds: int | None = None,
    trials: Sequence[Mapping[str, Any]] = (),
    read: LoadedData | None = None,
) -> RunInputs:
    """Select the device, load and check the data, load the model, and tokenize the texts.

    Report options that have no effect. Raise ``ConfigurationError`` if ``trials``, the
    options of each trial of a sweep, differ in one of them. ``read`` is the data if it was read
    to guess options.
    """
    check_report_to(config)
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
        data = load_splits(config.data, folds=folds, read=read)
        findings = []
        if data.has_labels:
            findings = suggest_changes(check_splits(data.splits, data.task), lengths=None)
        return_freed_memory()
    if not data.has_labels:
        config = _freeze(config)
    for finding in findings:
        if not (finding.remedy == BALANCE and config.training.class_weights == "balanced"):
            emit(finding)
    inputs = _load(config, device, data, {}, sources or {})
    _report_unread_options(inputs, trials)
    return inputs


def _freeze(config: Config) -> Config:
    """Return the configuration of a run without labels, whose encoder is frozen."""
    mode, training = config.model.mode, config.training
    options = [flag_of(name) for name in mode.kind.options] if mode.trains_encoder else []
    options += ["--contrastive on"] * (training.contrastive == "on")
    options += ["--fit-head off"] * (training.fit_head == "off")
    options += [f"--loss {training.loss}"] * (training.loss != TrainingConfig.loss)
    if options:
        raise ConfigurationError(
            f"{options[0]} can't be used without labels",
            remedy="drop it, or label some texts with finetune label",
        )
    return change_options(config, {"freeze_core": True})


def _report_unread_options(inputs: RunInputs, trials: Sequence[Mapping[str, Any]]) -> None:
    """Warn about set options that have no effect. Reject trials that differ only in those."""
    choose = partial(choose_method, task=inputs.task, rows=inputs.data.labeled_rows)
    planned, unread_by_trial = choose(inputs.config), []
    for trial in trials or [{}]:
        config = change_options(inputs.config, trial)
        chosen = choose(config)
        # The model may not support the planned method.
        method = inputs.method if chosen == planned else chosen
        unread_by_trial.append(find_unread(replace(inputs, config=config, method=method)))
    for name in sorted(set.intersection(*map(set, unread_by_trial))):
        option, (condition, remedy) = OPTIONS[name], unread_by_trial[0][name]
        message = f"{option.flag} has no effect {condition}"
        if any(name in trial for trial in trials):
            raise ConfigurationError(f"the trials can't differ: {message}", remedy=remedy)
        # 0 and --unlabeled none turn off what is off anyway. A batch-size search
        # also finds the size of evaluation.
        is_set = option.value_in(inputs.config) not in (option.default, 0, "auto", *option.names)
        is_read = name == "batch_size" and inputs.device.shapes.counts_evaluation
        # As it is in the configuration of each run.
        is_default = option.value_in(inputs.config) == inputs.mode.kind.head_lr_multiplier
        is_read |= name == "head_lr_multiplier" and is_default
        is_read |= name == "metric_for_best_model" and bool(trials)  # ranks the trials
        if is_set and not is_read:
            emit(WarningMessage(message, remedy=remedy))


def find_unread(inputs: RunInputs) -> dict[str, tuple[str, str]]:
    """Return the options that a run doesn't read, each with the reason and the option to add."""
    task, method, training = inputs.task.name, inputs.method, inputs.config.training
    is_plain, saves_steps = not method.fits_head, inputs.config.output.saves == "steps"
    auto_batch = "--batch-size auto"
    # The pool of all folds has no validation rows yet.
    is_pool = "test" not in inputs.examples
    is_unscored = is_plain and not is_pool and "validation" not in inputs.examples
    contrast = "--contrastive on" if task == "single" and inputs.mode.trains_encoder else ""
    optimizer = "batch_size learning_rate warmup_fraction weight_decay max_grad_norm"
    validations = "early_stopping_patience metric_for_best_model"
    epochs = f"effective_batch_size head_lr_multiplier num_train_epochs max_steps {validations}"
    few_shot = "unlabeled class_names class_descriptions"
    labels = "unlabeled class_names max_train_samples validation_fraction test_fraction corrections"
    labels += " label_map class_weights label_smoothing"
    table = (
        (method.is_contrastive, epochs, "with few-shot training", "--contrastive off"),
        (not method.reads_texts, few_shot, "without few-shot training", contrast),
        (not method.takes_steps, optimizer, "when a linear head is fitted", "--fit-head off"),
        (not method.takes_steps, epochs, "when a linear head is fitted", "--fit-head off"),
        (is_plain and training.max_steps, "num_train_epochs", "with --max-steps", ""),
        (is_unscored, validations, "without validation rows", "--validation-fraction 0.1"),
        (task != "multi", "empty_labels", f"with --task {task}", ""),
        (training.batch_size != "auto", "memory time_limit", f"without {auto_batch}", auto_batch),
        (not saves_steps, "save_steps", "with another --save-strategy", "--save-strategy steps"),
        (method.uses_prototypes, f"{labels} {optimizer} {epochs}", "without labels", ""),
    )
    return {
        name: (condition, f"drop it, or add {other}" if other else "drop it")
        for is_unread, names, condition, other in table
        if is_unread
        for name in names.split()
    }


def prepare_variant(
    shared: RunInputs, config: Config, *, fold: int | None = None, is_first: bool = False
) -> RunInputs:
    """Prepare the same rows with other options and the pretrained model.

    For a fold number, split the rows again, with the fold as the test split. The
    first variant can use the shared model, which is not trained yet.
    """
    is_encoded = all(
        OPTIONS[name].value_in(config) == OPTIONS[name].value_in(shared.config)
        for name in _TOKENIZER_OPTIONS
    )
    examples, inputs = shared.examples if is_encoded else {}, shared
    if not is_first or config != shared.config:
        inputs = _load(config, shared.device, shared.data, examples, shared.sources)
    if fold is None:
        return inputs
    data, pool = inputs.data, inputs.examples["train"]
    splits = split_fold(data.splits["train"], fold, config.data, task=data.task)
    rows = {name: split["example"].to_numpy() for name, split in splits.items()}
    examples = {**inputs.examples, **{name: pool.select(rows[name]) for name in rows}}
    return replace(inputs, data=replace(data, splits=splits), examples=examples, pool=pool)


def _load(
    config: Config,
    device: Device,
    data: LoadedData,
    examples: Mapping[str, Examples],
    sources: Mapping[str, str],
) -> RunInputs:
    """Load the model, and tokenize the texts unless they already are."""
    training, labels = config.training, data.task.labels(data.splits["train"]["label"])
    task = data.task.with_loss(labels, training)
    if user_metrics():
        _check_user_metrics(task, data.splits)
    choose_metric(training.metric_for_best_model, task.problem_type)
    method = choose_method(config, task, rows=data.labeled_rows)
    with stage("model"):
        text_model, method = load_for_training(config, method, task=task)
    # The manifest needs the digest, which takes half a second for BERT-base.
    _ = text_model.source.weights_digest
    if method.is_contrastive:
        data = with_few_label_texts(data, config.data)
    if method.reads_texts:
        data = replace(data, unlabeled=_sample(data.unlabeled))
    tables = data.splits | _few_label_tables(data) if method.reads_texts else data.splits
    with stage("tokenize"):
        examples = {
            name: replace(examples[name], weights=task.example_weights(examples[name].labels))
            if name in examples
            else encode_rows(rows, name, text_model, config=config, known=data.tokens)
            for name, rows in tables.items()
        }
    return_freed_memory()
    return RunInputs(config, device, data, examples, text_model, method, sources)


def _sample(texts: pyarrow.Table | None) -> pyarrow.Table | None:
    """Return a fixed sample if there are many texts."""
    if texts is None or len(texts) <= MAX_TEXTS:
        return texts
    return texts.take(np.random.default_rng(0).choice(len(texts), MAX_TEXTS, replace=False))


def _few_label_tables(data: LoadedData) -> Splits:
    """Return class names, and unlabeled texts with a placeholder as label."""
    tables = {"names": data.names} if data.names else {}
    if (table := data.unlabeled) is not None:
        (texts, *pairs), labels = table.columns, [data.task.class_names[0]] * len(table)
        tables["unlabeled"] = make_dataset(
            texts, labels, task=data.task, pairs=next(iter(pairs), None)
        )
    return tables


def _check_user_metrics(task: Task, splits: Splits) -> None:
    """Call the user's ``compute_metrics`` on random logits, so it fails before training."""
    name = next(name for name in ("validation", "test", "train") if name in splits)
    labels = task.labels(splits[name]["label"])
    logits = np.random.default_rng(0).normal(size=(len(labels), len(task.output_names)))
    task.score(logits.astype(np.float32), labels)


def encode_rows(
    rows: pyarrow.Table,
    split: str,
    text_model: TextModel,
    *,
    config: Config,
    known: KnownTokens | None = None,
) -> Examples:
    """Tokenize the texts of a split unless they are known. Warn if some are truncated."""
    texts, task, options = texts_of(rows), text_model.task, config.model
    longest, stride = min(options.max_length, text_model.max_tokens), options.window_stride
    encoded = known and known.find(texts, replace(options, max_length=longest))
    encoded = encoded or text_model.encode(*texts, max_length=longest, stride=stride)
    labels = task.labels(rows["label"])
    inputs = text_model.inputs(encoded)
    examples = Examples(
        inputs.inputs_of,
        inputs.lengths,
        labels,
        task.example_weights(labels),
        windows=inputs.windows,
        truncated_texts=encoded.truncated_texts,
    )
    remedy = "shorten the texts"
    if texts.pairs is None:
        remedy = "read whole texts with --long-texts windows"
    if options.max_length < text_model.max_tokens:
        remedy = f"raise --max-length or {remedy}"
    _report_long_texts(examples, split, remedy)
    if split == "train":
        tokenizer, tokens = text_model.tokenizer, int(examples.lengths.sum())
        unknown = encoded.count(tokenizer.unk_token_id)
        advice = suggest_model(tokenizer, texts.joined, unknown_tokens=unknown, tokens=tokens)
        if advice:
            emit(advice)
    return examples


def _report_long_texts(examples: Examples, split: str, remedy: str) -> None:
    """Warn about truncated texts, or report the number of windows."""
    texts, longer = len(examples.labels), examples.truncated_texts
    if examples.windows:
        longer = int(np.count_nonzero(examples.windows.counts > 1))
    message = f"{longer:,} of {texts:,} {split} texts ({longer / texts:.1%}) are longer than "
    message += f"{examples.lengths.max()} tokens"
    if examples.windows:
        emit(Info(f"{message}: {len(examples.lengths):,} windows in total"))
    elif longer:
        remedy = f"{remedy}, if the ends of these texts matter"
        emit(WarningMessage(f"{message} and are truncated", remedy=remedy))


def choose_method(config: Config, task: Task, *, rows: int) -> TrainingMethod:
    """Choose the training method for a configuration and its number of labeled rows.

    Raises:
        ConfigurationError: If a requested method can't be used.
    """
    training, obstacle, ranks = config.training, "", distributed.world_size()
    if not rows:
        reason = "no labels: class names and unlabeled texts make the head"
        return TrainingMethod(True, uses_prototypes=True, reason=reason)
    if config.model.mode.trains_encoder:
        option, choice = "contrastive", training.contrastive
        if training.fit_head == "on" and choice == "off":
            obstacle = "the encoder is trained, and --contrastive is off"
        elif training.fit_head == "off" and choice == "on":
            obstacle = "few-shot training fits the head, and --fit-head is off"
        elif task.name != "single":
            obstacle = f"the task is {task.name}"
        elif training.label_smoothing:
            obstacle = "the labels are smoothed"
        rows_per_class = rows / max(len(task.class_names), 1)
        is_due = rows_per_class <= MAX_ROWS_PER_CLASS and training.fit_head != "off"
        reason = f"few-shot, because there are only {rows_per_class:.0f} rows per class on average"
    else:
        option, choice, is_due = "fit-head", training.fit_head, True
        reason = "a linear head is fitted on the features of the frozen encoder"
    if ranks > 1:
        obstacle = f"there are {ranks} processes"
    elif training.loss != "cross_entropy":
        obstacle = f"the loss is {training.loss}, which has no single optimum"
    if choice == "on" or (option == "contrastive" and training.fit_head == "on"):
        if obstacle:
            flag = option if choice == "on" else "fit-head"
            raise ConfigurationError(
                f"--{flag} on can't be used: {obstacle}", remedy=f"use --{flag} auto"
            )
    elif choice == "off" or obstacle or not is_due:
        return TrainingMethod()
    elif names := [
        each.flag for each in OPTIONS.values() if each.selects_steps and each.value_in(config)
    ]:
        return TrainingMethod(reason=f"plain gradient descent, because {names[0]} is set")
    return TrainingMethod(True, is_contrastive=option == "contrastive", reason=reason)


def load_for_training(
    config: Config, method: TrainingMethod, *, task: Task
) -> tuple[TextModel, TrainingMethod]:
    """Load the pretrained model with a new head, and freeze the layers that aren't trained.

    If the model doesn't support the training method, plain gradient descent replaces it.
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
        reason = mean_pooling_unsupported_error(text_model.model).message
        emit(Info(f"pooling: auto, because {reason}"))
    mode, structure = config.model.mode, text_model.structure
    trained = trainable_parameter_names(structure, mode=mode)
    if method.fits_head:
        new_layers = structure.new - structure.output_layer
        passes = not new_layers and text_model.pooling != "mean"
        passes = passes or pass_through_head(text_model.model, structure)
        if not passes and new_layers and not method.is_contrastive:
            emit(Info("gradient descent trains the head, because layers below its output are new"))
            method = TrainingMethod()
        elif method.is_contrastive:
            # Freezing the embeddings makes steps a third faster at the same
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
            message = "the head reads the mean of the tokens, but the pretrained head doesn't"
            emit(Info(f"only the merged model is saved, without an adapter, because {message}"))
    set_trainable(text_model.model, trained, structure)
    count, total = count_parameters(text_model.model.parameters())
    counts = f"{count:,} of {total:,} parameters are trainable ({count / total:.1%})"
    emit(Info(f"model: {config.model.model}, mode {mode}, {counts}"))
    return text_model, method


def keep_tables(inputs: RunInputs, folder: RunFolder) -> RunInputs:
    """Move in-memory tables to files in the run folder."""
    values = {name: option.value_in(inputs.config) for name, option in OPTIONS.items()}
    waiting = {name: Path(path) for name, path in values.items() if is_waiting(path)}
    if not waiting:
        return inputs
    folder.tables = sorted({*waiting.values()})
    kept = {str(path): str(folder.path.resolve() / path.name) for path in folder.tables}
    config = change_options(inputs.config, {name: kept[values[name]] for name in waiting})
    sources = [
        replace(source, name=kept.get(source.name, source.name)) for source in inputs.data.sources
    ]
    return replace(inputs, config=config, data=replace(inputs.data, sources=sources))
