"""Every option of a run, with its default, its range and its help: the only home of defaults.

Command line, YAML files, environment variables and Python API are made from these classes.
Names are unique over all sections.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.mode import HeadName, Lora, Mode
from finetune.devices import DeviceName, Precision, PrecisionName

DEFAULT_BATCH_SIZE = 32
# Larger tables certainly have enough rows, and encoding them takes time.
MAX_ESTIMATED_ROWS = 50_000
HEAD_LEARNING_RATE = 5e-4
# BERT-base's pooler ends in a tanh that is mostly far from 0.
TYPICAL_OUTPUT_LAYER_INPUT = 0.7
# Prefix of --data for datasets on the Hub.
HUB_PREFIX = "hub:"
# The adapters of a batch-size search without --lora-rank.
DEFAULT_LORA = Lora(rank=8, alpha=16, dropout=0.0, targets="auto")


# The marks are fields of ``Option``.
def _option(default: Any, description: str, **marks: Any) -> Any:
    return field(default=default, metadata={"description": description, **marks})


_first = partial(_option, is_first=True)
_resumable = partial(_option, resumable=True)
_of_trec = partial(_option, goes_with=("trec",))
_of_files = partial(_option, path="file", goes_with=("a file",))
_of_tables = partial(_option, goes_with=("a file", "a dataset of the Hub"))
_of_lora = partial(_option, needs="--lora-rank 8")

# The upper bounds reject what would overflow in kernels, timeouts or byte counts later.
PositiveInt = Annotated[int, Ge(1), Lt(2**31)]
NonNegativeInt = Annotated[int, Ge(0), Lt(2**31)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
PositiveFloat = Annotated[float, Gt(0.0), Le(1e6)]
NonNegativeFloat = Annotated[float, Ge(0.0), Le(1e6)]
HalfOpenUnitInterval = Annotated[float, Ge(0.0), Lt(1.0)]
UnitInterval = Annotated[float, Ge(0.0), Le(1.0)]
Pooling = Literal["auto", "cls", "mean"]
Switch = Literal["auto", "on", "off"]
SaveStrategy = Literal["epoch", "time", "no", "steps"]
Tracker = Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]


@dataclass(frozen=True)
class DataConfig:
    """Which texts and labels, and how they are split."""

    data: str = _option(
        "trec",
        "Data: a table (.csv, .tsv, .jsonl, .json, .parquet, .xlsx; .gz and .zip are unpacked); a "
        "folder of tables, or of one folder of texts per class; hub:OWNER/NAME[:PART][@REVISION] "
        "on the Hugging Face Hub; trec, which is downloaded; or questions, which is bundled.",
        path="file",
        names=("trec", "questions"),
        other_names="dataset_name train_file dataset train",
    )
    table: str | None = _option(
        None,
        "Table to read if --data has several: a file of a .zip or folder, a sheet, a key of JSON.",
        goes_with=("a file",),
    )
    validation_file: str | None = _of_files(None, "Validation split. Default: rows of --data.")
    test_file: str | None = _of_files(None, "Test split. Default: 10% of the rows.", is_first=True)
    text_column: str | None = _of_tables(
        None,
        "Column of the texts, or several, such as title,body. Default: guessed.",
        is_first=True,
        other_names="text",
    )
    text_pair_column: str | None = _of_tables(
        None, "Column of second texts, for sentence pairs. Default: guessed from its name."
    )
    label_column: str | None = _of_tables(
        None,
        "Column of the labels, or several of 0 and 1, such as joy,fear. Default: guessed.",
        is_first=True,
        other_names="labels target",
    )
    task: str = _option(
        "auto",
        "single (one class per text), multi (multi-label), regression, or auto (depends on the "
        "labels).",
    )
    encoding: str | None = _of_tables(None, "Encoding, such as gb18030. Default: detected.")
    header: bool | None = _of_tables(
        None, "Whether the first row has the names of the columns. Default: detected."
    )
    split_column: str | None = _of_tables(
        None, "Column that says which split a row belongs to, or none. Default: guessed."
    )
    label_names: str | None = _of_tables(
        None, "File with the names of the classes, one per line.", path="file"
    )
    skip_unknown_labels: bool = _of_tables(
        False, "Skip validation and test rows whose label is in no training row."
    )
    empty_labels: Literal["unlabeled", "none"] | None = _of_tables(
        None, "Multi-label: an empty cell means unlabeled (row left out) or none of the classes."
    )
    unlabeled: str | None = _option(
        None,
        "File of unlabeled texts, which few-label training learns from, too; best the texts that "
        "you want to classify. none: ignore rows without a label. Default: the rows of --data "
        "without a label.",
        path="file",
        names=("none",),
    )
    corrections: str | None = _option(
        None, "suspects.csv of finetune data audit, with your decisions on labels.", path="file"
    )
    label_map: str | None = _option(
        None, "File that renames or merges labels: a label and its new name per row.", path="file"
    )
    data_dir: str | None = _of_trec(None, "Folder with the raw files of TREC.", path="dir")
    label: Literal["label-coarse", "label-fine"] = _of_trec(
        "label-coarse", "Labels of TREC: label-coarse (6 classes) or label-fine (50 classes)."
    )
    max_train_samples: PositiveInt | None = _option(
        None, "Train on N rows only: a stratified sample, or the first N rows of TREC."
    )
    validation_fraction: HalfOpenUnitInterval | None = _option(
        None,
        "Fraction of the rows held out for validation; 0 for none. Default: 0.1; 0 for fewer than "
        "1,000 rows, except multi-label rows.",
        other_names="val_split val_size validation_split",
    )
    test_fraction: Annotated[float, Gt(0.0), Lt(1.0)] = _option(
        0.1,
        "Fraction of the rows held out for testing if the data has no test split.",
        other_names="test_size test_split",
    )
    split_seed: Seed = _option(0, "Random seed of the held-out splits.")
    private_data: bool = _option(
        False, "Mark the texts as private: finetune push rejects the report."
    )


@dataclass(frozen=True)
class ModelConfig:
    """Which pretrained model, and which part of it trains."""

    model: str = _first(
        "bert-base-uncased",
        "Text encoder: Hub ID, folder, or minilm (works offline).",
        path="dir",
        names=("minilm",),
        is_guessed=True,
        other_names="model_name_or_path",
    )
    revision: str | None = _option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = _option(
        False, "Accept a model folder that lacks most weights, which then start random."
    )
    freeze_core: bool = _first(
        False,
        "Freeze the encoder; fit a linear head on the mean of its tokens.",
        other_names="freeze freeze_encoder",
    )
    head: HeadName = _option(
        "whole",
        "Part of the head to train. classifier: freeze the encoder as --freeze-core does and, with "
        "--fit-head off, a pretrained pooler too.",
    )
    train_layers: PositiveInt | None = _first(None, "Train only the last N layers and the head.")
    lora_rank: PositiveInt | None = _option(
        None,
        "Freeze the encoder, and train LoRA adapters of this rank, such as 8, and the head. Needs "
        "the package peft.",
        other_names="lora lora_r",
    )
    lora_alpha: PositiveInt | None = _of_lora(
        None, "Scale of the LoRA updates, which is alpha / rank. Default: twice the rank."
    )
    lora_dropout: HalfOpenUnitInterval = _of_lora(0.0, "Dropout of the inputs of LoRA adapters.")
    lora_targets: str = _of_lora(
        "auto",
        "Linear layers that get adapters: attention, all-linear, names such as query,value, or "
        "auto, which is all-linear.",
    )
    merge: bool = _of_lora(True, "Also save the model with the LoRA adapters merged into it.")
    pooling: Pooling = _option(
        "auto",
        "What the head reads: the first token (cls) or the mean of all tokens. auto: mean if a "
        "linear head is fitted, otherwise as pretrained.",
    )
    max_length: Annotated[int, Ge(3), Lt(2**31)] = _first(
        128, "Maximum tokens per text.", is_guessed=True, other_names="max_seq_length"
    )
    long_texts: Literal["truncate", "windows"] = _option(
        "truncate",
        "Texts longer than --max-length: drop the end (truncate), or read everything in "
        "overlapping windows.",
    )
    stride: NonNegativeInt = _option(32, "Tokens that consecutive windows of a text share.")

    @property
    def window_stride(self) -> int | None:
        """Tokens of overlap between the windows of a long text; None if texts are truncated."""
        return self.stride if self.long_texts == "windows" else None

    @property
    def mode(self) -> Mode:
        """What trains."""
        if self.head == "classifier":
            return Mode("classifier")
        if self.freeze_core:
            return Mode("head")
        last = [] if self.train_layers is None else [f"last-{self.train_layers}"]
        return Mode("-".join(["lora"] * (self.lora_rank is not None) + last) or "full")

    @property
    def lora(self) -> Lora | None:
        """The adapters that train, if any do."""
        if self.lora_rank is None or not self.mode.is_lora:
            return None
        alpha = self.lora_alpha or 2 * self.lora_rank
        return Lora(self.lora_rank, alpha, self.lora_dropout, self.lora_targets)


@dataclass(frozen=True)
class TrainingConfig:
    """How the model trains."""

    device: DeviceName = _resumable(
        "auto",
        "Device; auto prefers cuda, then mps, then cpu.",
        is_first=True,
        other_names="no_cuda use_cpu gpu cuda mps cpu",
    )
    precision: PrecisionName = _option(
        "auto",
        "Precision of the forward pass (autocast); weights stay fp32. auto: bf16 on cuda if the "
        "GPU supports it; the faster one on cpu; on mps fp32, unless finetune doctor --parity "
        "passed in bf16.",
        other_names="bf16 fp16",
    )
    batch_size: PositiveInt | Literal["auto"] = _resumable(
        DEFAULT_BATCH_SIZE,
        "Examples per forward and backward pass; auto finds the fastest.",
        is_first=True,
        other_names="per_device_train_batch_size",
    )
    check_device: bool | None = _resumable(
        None, "Compare a GPU with the CPU on a few examples before training. Default: on mps."
    )
    gradient_checkpointing: bool | None = _resumable(
        None,
        "Save memory by computing the layers again in the backward pass. Default: off; "
        "--batch-size auto decides.",
    )
    effective_batch_size: PositiveInt | None = _option(
        None,
        "Examples per optimizer step; gradients are accumulated. Default: the batch size.",
        other_names="gradient_accumulation_steps",
    )
    eval_batch_size: PositiveInt = _resumable(
        64, "Examples per forward pass in evaluation; a run on mps uses --batch-size."
    )
    learning_rate: PositiveFloat | None = _first(
        None,
        "Peak learning rate; selects plain gradient descent. Default: depends on the model.",
        other_names="lr",
        selects_steps=True,
    )
    head_lr_multiplier: PositiveFloat | None = _option(
        None,
        "Learning rate of the head as a multiple of --learning-rate. Default: 10; 1 with LoRA or "
        "a frozen encoder.",
    )
    num_train_epochs: PositiveFloat | None = _first(
        None,
        "Passes over the training split; selects plain gradient descent. Default: 3, or more for "
        "few rows; 100 with a frozen encoder.",
        other_names="epochs",
        selects_steps=True,
    )
    max_steps: PositiveInt | None = _option(
        None,
        "Stop after N steps instead of epochs; selects plain gradient descent.",
        selects_steps=True,
    )
    warmup_fraction: UnitInterval = _option(
        0.1,
        "Fraction of the steps during which the learning rate rises.",
        other_names="warmup_steps",
    )
    weight_decay: NonNegativeFloat | None = _option(
        None,
        "Decoupled weight decay, except on biases and norms. Default: 0.01; 0 with LoRA or a "
        "frozen encoder.",
    )
    max_grad_norm: PositiveFloat = _option(1.0, "Gradients are clipped to this norm.")
    class_weights: Literal["none", "balanced"] = _option(
        "none", "balanced weights the loss of each class by its inverse frequency."
    )
    contrastive: Switch = _option(
        "auto",
        "Few-shot training: train the encoder with a supervised contrastive loss, then fit a "
        "linear head. auto: for at most 100 rows per class.",
    )
    fit_head: Switch = _option(
        "auto",
        "Fit the head as a logistic regression instead of training it with gradient descent. "
        "auto: with a frozen encoder, and after few-shot training.",
    )
    loss: Literal["cross_entropy", "focal"] = _option(
        "cross_entropy", "Loss of classes; focal gives examples that are easy less weight."
    )
    focal_gamma: NonNegativeFloat = _option(
        2.0, "Exponent of the focal loss; 0 is cross-entropy.", needs="--loss focal"
    )
    label_smoothing: HalfOpenUnitInterval = _option(
        0.0,
        "Fraction of the weight of a label that is spread over all classes.",
        other_names="label_smoothing_factor",
    )
    metric_for_best_model: str | None = _option(
        None,
        "Validation metric that selects the model to keep, such as macro_f1, mcc or loss. "
        "Default: accuracy; micro_f1 for multi-label; pearson for regression.",
    )
    early_stopping_patience: NonNegativeInt | None = _option(
        None,
        "Stop after N validations without improvement; 0 for never. Default: 0; 8 for few rows; "
        "at most 30 with a frozen encoder.",
        other_names="patience",
    )
    calibrate: bool = _option(
        True, "Scale the logits so that predicted probabilities match the accuracy."
    )
    seed: Seed = _first(42, "Random seed of new weights, order and dropout.")

    @property
    def examples_per_step(self) -> int:
        """The effective batch size; for batch size auto, the default batch size."""
        if self.effective_batch_size is not None:
            return self.effective_batch_size
        return DEFAULT_BATCH_SIZE if self.batch_size == "auto" else self.batch_size

    @property
    def precision_without_timing(self) -> Precision:
        """The precision of what is not timed, such as a search for batch sizes."""
        return "fp32" if self.precision == "auto" else self.precision


@dataclass(frozen=True)
class OutputConfig:
    """Where the results go and how often progress is reported and saved."""

    output_dir: str | None = _first(
        None,
        "Folder to write. Default: a new folder in runs/.",
        path="dir",
        other_names="output out",
    )
    overwrite: bool = _first(False, "Replace the earlier run in --output-dir; other files stay.")
    logging_steps: PositiveInt = _resumable(10, "Report the training loss every N steps.")
    report_to: Tracker = _resumable("none", "Tracker that also gets losses and validations.")
    save_strategy: SaveStrategy | None = _resumable(
        None,
        "When to write checkpoints: time (at most 3% of the training time), epoch, steps, or no "
        "(only if the run is stopped). Default: time; steps with --save-steps.",
    )
    save_steps: PositiveInt | None = _resumable(
        None, "Steps between two checkpoints. Default: 500."
    )
    save_total_limit: PositiveInt = _resumable(
        2, "Keep the N newest checkpoints, and the best one."
    )

    @property
    def saves(self) -> SaveStrategy:
        """When checkpoints are written."""
        return self.save_strategy or ("steps" if self.save_steps else "time")


@dataclass(frozen=True)
class CacheConfig:
    """Whether and where the features of frozen layers are stored."""

    feature_cache: bool = _resumable(
        True, "Store features of frozen layers and token IDs for other runs."
    )
    cache_dir: str | None = _resumable(
        None,
        "Folder of stored features. Default: finetune in the assets folder of the Hub cache.",
        path="dir",
    )
    cache_gib: PositiveFloat = _resumable(
        10.0, "Maximum GiB to store; the least recently used files are deleted."
    )


@dataclass(frozen=True)
class SearchConfig:
    """How a batch size is searched for, by ``find-batch`` and by ``--batch-size auto``."""

    memory: str | None = _option(
        None, "Memory to use, such as 4GiB. Default: all that is free.", other_names="memory_limit"
    )
    time_limit: PositiveFloat = _option(
        300.0, "Maximum seconds of a search for batch sizes, for each device and mode."
    )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


def flag_of(name: str) -> str:
    """Return the name of an option on the command line."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """An option, as its field declares it."""

    section: str
    name: str
    type: Any
    default: Any
    description: str
    resumable: bool = False  # it may change when a run is resumed
    path: Literal["", "file", "dir"] = ""
    names: tuple[str, ...] = ()  # words with a meaning of their own, in place of a path
    goes_with: tuple[str, ...] = ()  # the sources of data that it is for; empty for all
    needs: str = ""  # the option without which it has no effect
    is_first: bool = False  # --help lists it, not only --help-all
    is_guessed: bool = False  # of a table that the call names
    selects_steps: bool = False  # setting it selects training with gradient descent
    other_names: str = ""  # what transformers and other tools call it

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return flag_of(self.name)

    @property
    def purpose(self) -> str:
        """The first sentence of its help."""
        return self.description.partition(". ")[0].rstrip(".")

    @property
    def is_path(self) -> bool:
        """Whether its value is always the name of a file or folder."""
        return bool(self.path) and not self.names

    def value_in(self, config: Config) -> Any:
        """Return its value in a configuration."""
        return getattr(getattr(config, self.section), self.name)


OPTIONS: dict[str, Option] = {
    one.name: Option(section, one.name, hint, one.default, **one.metadata)
    for section, kind in get_type_hints(Config).items()
    for one, hint in zip(
        fields(kind), get_type_hints(kind, include_extras=True).values(), strict=True
    )
}


OPTION_BY_OTHER_NAME = {
    other: option.name for option in OPTIONS.values() for other in option.other_names.split()
}


def change_options(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a configuration in which these options have these values."""
    for name, value in values.items():
        section = OPTIONS[name].section
        changed: Any = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config


def default_learning_rate(mode: Mode, *, hidden_size: int, structure: Any) -> float:
    """Return the peak learning rate for a mode and the ``Structure`` of a model."""
    if mode.trains_encoder:
        # Inversely proportional to the hidden size, 5e-5 at BERT-base's.
        return 5e-5 * 768 / hidden_size * (LORA_LR_MULTIPLIER if mode.is_lora else 1)
    if mode == "head" or structure.new - structure.output_layer:
        return HEAD_LEARNING_RATE
    # The input from MiniLM's pooler is a tenth of BERT-base's: one rate for both costs the other 3
    # points of accuracy. It is far too high if layers beneath the output layer train too.
    return float(f"{7e-3 / (structure.output_layer_input or TYPICAL_OUTPUT_LAYER_INPUT):.2g}")


@dataclass(frozen=True)
class ModeDefaults:
    """Values of the options that are not given."""

    num_train_epochs: float
    head_lr_multiplier: float
    weight_decay: float
    early_stopping_patience: int


# A head on stored features trains until it stops improving, for at most 100 epochs and at most as
# many steps as TREC has in 100. Larger data needs fewer epochs, and is validated after each.
MAX_HEAD_EPOCHS = 100
MAX_HEAD_STEPS = 14_000

# Few rows need more epochs: from 250 steps on, five datasets of 150 to 1,000 rows came within a
# point of their best of 3, 10, 20 and 40 epochs. TREC takes three (docs/measurements.md).
MIN_EPOCHS = 3
MIN_STEPS = 250
MAX_FEW_ROWS_EPOCHS = 40
FEW_ROWS_PATIENCE = 8
# Relative to the learning rate of other modes; the head uses the same rate (docs/measurements.md).
LORA_LR_MULTIPLIER = 20
MIN_LORA_STEPS = 400
# Half a point of accuracy on TREC over 10 splits; 5 and 20 times gave the same.
LR_MULTIPLIER = 10.0


def mode_defaults(mode: Mode, *, steps_per_epoch: int) -> ModeDefaults:
    """Return the defaults that depend on the mode and the number of rows."""
    if mode.trains_encoder:
        least = MIN_LORA_STEPS if mode.is_lora else MIN_STEPS
        epochs = min(math.ceil(least / steps_per_epoch), MAX_FEW_ROWS_EPOCHS)
        patience = FEW_ROWS_PATIENCE if epochs > MIN_EPOCHS else 0
        multiplier, decay = (1.0, 0.0) if mode.is_lora else (LR_MULTIPLIER, 0.01)
        return ModeDefaults(float(max(epochs, MIN_EPOCHS)), multiplier, decay, patience)
    epochs = max(1, min(MAX_HEAD_STEPS // steps_per_epoch, MAX_HEAD_EPOCHS))
    return ModeDefaults(float(epochs), 1.0, 0.0, math.ceil(epochs * 30 / 100))
