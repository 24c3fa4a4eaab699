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
# Above this nobody asks whether the rows are enough, and encoding them takes time.
MAX_ESTIMATED_ROWS = 50_000
HEAD_LEARNING_RATE = 5e-4
# BERT-base's pooler ends in a tanh that is mostly far from 0.
TYPICAL_OUTPUT_LAYER_INPUT = 0.7
# Of the names of datasets of the Hub.
HUB_PREFIX = "hub:"
# Of a search for batch sizes in which no rank is given.
DEFAULT_LORA = Lora(rank=8, alpha=16, dropout=0.0, targets="auto")


# The marks are fields of ``Option``.
def _option(default: Any, description: str, **marks: Any) -> Any:
    return field(default=default, metadata={"description": description, **marks})


_resumable = partial(_option, resumable=True)
_of_trec = partial(_option, goes_with=("trec",))
_of_files = partial(_option, path="file", goes_with=("a file",))
_of_tables = partial(_option, goes_with=("a file", "a dataset of the Hub"))

# The upper bounds refuse what would overflow in kernels, timeouts or byte counts later.
PositiveInt = Annotated[int, Ge(1), Lt(2**31)]
NonNegativeInt = Annotated[int, Ge(0), Lt(2**31)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Pooling = Literal["auto", "cls", "mean"]
Switch = Literal["auto", "on", "off"]
SaveStrategy = Literal["epoch", "time", "no", "steps"]
Tracker = Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]
PositiveFloat = Annotated[float, Gt(0.0), Le(1e6)]
NonNegativeFloat = Annotated[float, Ge(0.0), Le(1e6)]
HalfOpenUnitInterval = Annotated[float, Ge(0.0), Lt(1.0)]
UnitInterval = Annotated[float, Ge(0.0), Le(1.0)]


@dataclass(frozen=True)
class DataConfig:
    """Which texts and labels, and how they are split."""

    data: str = _option(
        "trec",
        "trec; questions (part of the package); a .csv, .tsv, .jsonl, .json, .parquet, .xlsx or "
        "other table, also in a .gz or .zip; a folder of tables, or of texts by class; or a "
        "dataset of the Hub, hub:OWNER/NAME[:PART][@REVISION].",
        path="file",
        names=("trec", "questions"),
    )
    table: str | None = _option(
        None, "Table to read of several in --data: file of a .zip or folder, sheet, key of JSON.",
        goes_with=("a file",),
    )  # fmt: skip
    validation_file: str | None = _of_files(None, "Validation split. Default: held out.")
    test_file: str | None = _of_files(None, "Test split. Default: held out.")
    text_column: str | None = _of_tables(
        None, "Column of the texts, by name or number; several as title,body. Default: guessed."
    )
    text_pair_column: str | None = _of_tables(None, "Column of second texts. Default: by its name.")
    label_column: str | None = _of_tables(
        None, "Column of the labels, or several of 0 and 1, such as joy,fear. Default: guessed."
    )
    task: str = _option(
        "auto", "single (one class per text), multi (any number), regression, auto (by the labels)."
    )
    encoding: str | None = _of_tables(None, "Encoding, such as gb18030. Default: detected.")
    header: bool | None = _of_tables(None, "The first row names columns. Default: detected.")
    split_column: str | None = _of_tables(None, "Column of splits, or none. Default: by its name.")
    label_names: str | None = _of_tables(None, "File of class names, one a line.", path="file")
    skip_unknown_labels: bool = _of_tables(False, "Skip rows whose label no training row has.")
    empty_labels: Literal["unlabeled", "none"] | None = _of_tables(
        None, "Multi-label: an empty label is unlabeled (left out), or none of the classes."
    )
    corrections: str | None = _option(
        None, "File of decisions on labels, suspects.csv of finetune data audit.", path="file"
    )
    label_map: str | None = _option(
        None, "File with a label and its new name in each row, to rename or merge.", path="file"
    )
    data_dir: str | None = _of_trec(None, "Folder with the raw files of TREC.", path="dir")
    label: Literal["label-coarse", "label-fine"] = _of_trec(
        "label-coarse", "TREC: label-coarse (6 classes) or label-fine (50)."
    )
    max_train_samples: PositiveInt | None = _option(
        None, "Train on N rows. TREC: the first N; otherwise a stratified sample."
    )
    validation_fraction: HalfOpenUnitInterval | None = _option(
        None,
        "Fraction of rows held out for validation; or 0. Default: 0.1, but none of fewer than "
        "1,000 rows, unless they have several labels.",
    )
    test_fraction: Annotated[float, Gt(0.0), Lt(1.0)] = _option(
        0.1, "Fraction of the rows held out as test split where the data has none."
    )
    split_seed: Seed = _option(0, "Random seed of the held-out splits.")
    private_data: bool = _option(False, "Keep the texts private: push refuses the report.")


@dataclass(frozen=True)
class ModelConfig:
    """Which pretrained model, and which part of it trains."""

    model: str = _option(
        "bert-base-uncased",
        "Hub id or folder of a text encoder, or minilm (works offline).",
        path="dir",
        names=("minilm",),
    )
    revision: str | None = _option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = _option(False, "Accept a model most of whose weights are missing.")
    freeze_core: bool = _option(False, "Freeze the encoder; only the head trains.")
    head: HeadName = _option(
        "whole", "Part of the head that trains; classifier freezes a pretrained pooler too."
    )
    train_layers: PositiveInt | None = _option(None, "Train only the last N layers, and the head.")
    lora_rank: PositiveInt | None = _option(
        None,
        "Train LoRA adapters of this rank, such as 8, and the output layer; the layers stay frozen."
        " Needs the extra lora.",
    )
    lora_alpha: PositiveInt | None = _option(
        None, "LoRA's updates count alpha / rank. Default: twice the rank."
    )
    lora_dropout: HalfOpenUnitInterval = _option(0.0, "Dropout of what LoRA's adapters read.")
    lora_targets: str = _option(
        "auto",
        "Linear layers with adapters: attention, all-linear, auto (which is all-linear), or names "
        "such as query,value.",
    )
    merge: bool = _option(True, "Also save the model with LoRA's adapters merged into it.")
    pooling: Pooling = _option(
        "auto", "What the head reads of a text: the first token (cls) or the mean of all."
    )
    max_length: Annotated[int, Ge(3), Lt(2**31)] = _option(128, "Maximum tokens of a text.")
    long_texts: Literal["truncate", "windows"] = _option(
        "truncate", "Truncate texts over --max-length, or read all of them in windows."
    )
    stride: NonNegativeInt = _option(32, "Tokens of overlap between the windows of a text.")

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

    device: DeviceName = _resumable("auto", "Device; auto takes cuda, then mps, then cpu.")
    precision: PrecisionName = _option(
        "auto",
        "Precision of the forward pass (autocast); the weights stay fp32. auto: bf16 on cuda GPUs "
        "that have it; the faster for an encoder layer on cpu; on mps fp32 unless finetune doctor "
        "--parity has passed in bf16.",
    )
    batch_size: PositiveInt | Literal["auto"] = _resumable(
        DEFAULT_BATCH_SIZE,
        "Examples per forward and backward pass; auto searches for the fastest that fits.",
    )
    check_device: bool | None = _resumable(
        None, "Compare a GPU with the CPU on a few examples. Default: on mps."
    )
    gradient_checkpointing: bool | None = _resumable(
        None, "Recompute the layers in the backward pass. Default: off; --batch-size auto chooses."
    )
    effective_batch_size: PositiveInt | None = _option(
        None, "Examples per optimizer step; gradients are accumulated. Default: the batch size."
    )
    eval_batch_size: PositiveInt = _resumable(
        64, "Examples per forward pass in evaluation; on mps a run uses --batch-size."
    )
    learning_rate: PositiveFloat | None = _option(
        None, "Peak learning rate. Default: by mode and hidden size."
    )
    head_lr_multiplier: PositiveFloat | None = _option(
        None, "Multiple of the learning rate for the head. Default: 10, 1 for a head alone."
    )
    num_train_epochs: PositiveFloat | None = _option(
        None,
        "Passes over the training split. Default: 3, for a head alone 100; adapted to the rows.",
    )
    max_steps: PositiveInt | None = _option(None, "Stop after N steps, not after epochs.")
    warmup_fraction: UnitInterval = _option(
        0.1, "Fraction of the steps in which the learning rate rises."
    )
    weight_decay: NonNegativeFloat | None = _option(
        None, "Decoupled weight decay; not on biases and norms. Default: 0.01, 0 for a head alone."
    )
    max_grad_norm: PositiveFloat = _option(1.0, "Gradients are clipped to this norm.")
    class_weights: Literal["none", "balanced"] = _option(
        "none", "balanced weights the loss of each class by the inverse of its frequency."
    )
    contrastive: Switch = _option(
        "auto", "Contrastive steps on the encoder before the head is solved. auto: for few labels."
    )
    fit_head: Switch = _option(
        "auto", "Solve the output layer as a convex problem instead of stepping towards it."
    )
    loss: Literal["cross_entropy", "focal"] = _option(
        "cross_entropy", "Loss of classes; focal gives learned examples less weight."
    )
    focal_gamma: NonNegativeFloat = _option(2.0, "Exponent of the focal loss; 0 is cross-entropy.")
    label_smoothing: HalfOpenUnitInterval = _option(
        0.0, "Part of a label's weight that is spread over all classes."
    )
    metric_for_best_model: str | None = _option(
        None,
        "Validation metric that selects the model to keep, such as macro_f1, mcc or loss. "
        "Default: accuracy, micro_f1 for multi, pearson for regression.",
    )
    early_stopping_patience: NonNegativeInt | None = _option(
        None, "Stop after N validations without gain. Default: 0 (never), few rows 8, a head 30."
    )
    calibrate: bool = _option(True, "Scale the logits so that probabilities match accuracy.")
    seed: Seed = _option(42, "Random seed of the new head, the order of the examples and dropout.")

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

    output_dir: str | None = _option(
        None, "Run folder. Default: a new folder runs/DATA-MODEL-MODE.", path="dir"
    )
    overwrite: bool = _option(
        False, "Start over: delete the earlier run's files in the folder, and no others."
    )
    logging_steps: PositiveInt = _resumable(10, "Report the training loss every N steps.")
    report_to: Tracker = _resumable("none", "Also report losses and validations to a tracker.")
    save_strategy: SaveStrategy | None = _resumable(
        None,
        "When to write checkpoints: time (as often as takes at most 3 % of the time), epoch, "
        "steps, or no (only if the run is stopped). A crash loses the work since the last that the "
        "disk has: while one is written, the next waits in memory. "
        "Default: time, with --save-steps steps.",
    )
    save_steps: PositiveInt | None = _resumable(
        None, "Steps between two checkpoints. Default: 500."
    )
    save_total_limit: PositiveInt = _resumable(2, "Keep the N newest checkpoints, and the best.")

    @property
    def saves(self) -> SaveStrategy:
        """When checkpoints are written."""
        return self.save_strategy or ("steps" if self.save_steps else "time")


@dataclass(frozen=True)
class CacheConfig:
    """Whether and where the features of frozen layers are stored."""

    feature_cache: bool = _resumable(True, "Store features and token ids for other runs.")
    cache_dir: str | None = _resumable(
        None, "Folder of what is stored. Default: finetune in the Hub's assets cache.", path="dir"
    )
    cache_gib: PositiveFloat = _resumable(10.0, "Maximum GiB stored; the least recently used go.")


@dataclass(frozen=True)
class SearchConfig:
    """How a batch size is searched for, by ``find-batch`` and by ``--batch-size auto``."""

    memory: str | None = _option(None, "Memory to use, such as 4GiB. Default: all free.")
    time_limit: PositiveFloat = _option(
        300.0, "Maximum seconds of the search for each device and mode."
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

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return flag_of(self.name)

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


# What transformers, its examples and other tools call an option.
_OTHER_NAMES = {
    "data": "dataset_name train_file dataset input train",
    "text_column": "text text_field",
    "label_column": "labels target y",
    "validation_fraction": "val_split val_size validation_split",
    "test_fraction": "test_size test_split",
    "model": "model_name_or_path base_model m",
    "freeze_core": "freeze freeze_encoder",
    "lora_rank": "lora lora_r",
    "max_length": "max_seq_length max_len",
    "device": "no_cuda use_cpu gpu cuda mps cpu",
    "precision": "bf16 fp16",
    "batch_size": "per_device_train_batch_size batch bs",
    "effective_batch_size": "gradient_accumulation_steps",
    "learning_rate": "lr",
    "num_train_epochs": "epochs epoch num_epochs",
    "warmup_fraction": "warmup_steps",
    "early_stopping_patience": "patience",
    "label_smoothing": "label_smoothing_factor",
    "output_dir": "output out o",
    "memory": "memory_limit",
}
OPTION_BY_OTHER_NAME = {
    other: name for name, others in _OTHER_NAMES.items() for other in others.split()
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


# A head over stored features trains until it stops improving: 100 epochs are a maximum, of fewer
# steps than those of TREC. Larger data needs fewer epochs, and is validated after each.
MAX_EPOCHS_OF_A_HEAD = 100
MAX_STEPS_OF_A_HEAD = 14_000

# Few rows need more epochs: from 250 steps on, five datasets of 150 to 1,000 rows came within a
# point of their best of 3, 10, 20 and 40 epochs. TREC takes three (docs/measurements.md).
MIN_EPOCHS = 3
MIN_STEPS = 250
MAX_EPOCHS_OF_FEW_ROWS = 40
PATIENCE_OF_FEW_ROWS = 8
# Of all other modes. The head's is the same. (docs/measurements.md)
LORA_LR_MULTIPLIER = 20
MIN_STEPS_OF_LORA = 400
# Half a point of accuracy on TREC over 10 splits; 5 and 20 times gave the same.
LR_MULTIPLIER = 10.0


def mode_defaults(mode: Mode, *, steps_per_epoch: int) -> ModeDefaults:
    """Return the defaults that depend on the mode and the number of rows."""
    if mode.trains_encoder:
        least = MIN_STEPS_OF_LORA if mode.is_lora else MIN_STEPS
        epochs = min(math.ceil(least / steps_per_epoch), MAX_EPOCHS_OF_FEW_ROWS)
        patience = PATIENCE_OF_FEW_ROWS if epochs > MIN_EPOCHS else 0
        multiplier, decay = (1.0, 0.0) if mode.is_lora else (LR_MULTIPLIER, 0.01)
        return ModeDefaults(float(max(epochs, MIN_EPOCHS)), multiplier, decay, patience)
    epochs = max(1, min(MAX_STEPS_OF_A_HEAD // steps_per_epoch, MAX_EPOCHS_OF_A_HEAD))
    return ModeDefaults(float(epochs), 1.0, 0.0, math.ceil(epochs * 30 / 100))
