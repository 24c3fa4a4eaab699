"""All run options, with types, defaults, ranges and help.

These classes define the command line, YAML keys, environment variables and the Python API. Option
names are unique across sections.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import getdoc
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.modes import Mode
from finetune.devices import DeviceName, Precision, PrecisionName

DEFAULT_BATCH_SIZE = 32
# Larger tables get no linear-head estimate, because tokenizing them takes too long.
MAX_ESTIMATED_ROWS = 50_000
# Prefix of --data for datasets on the Hub.
HUB_PREFIX = "hub:"


@dataclass(frozen=True)
class Lora:
    """LoRA adapters: two matrices per linear layer, whose product is scaled by alpha / rank."""

    rank: int
    alpha: int
    dropout: float
    targets: str


# What find-batch assumes without --lora-rank.
DEFAULT_LORA = Lora(rank=8, alpha=16, dropout=0.0, targets="auto")


# The keywords are fields of ``Option``.
def _option(default: Any, **marks: Any) -> Any:
    return field(default=default, metadata=marks)


_first = partial(_option, is_first=True)
_resumable = partial(_option, resumable=True)
_trec_only = partial(_option, goes_with=("trec",))
_file = partial(_option, path="file")
_file_or_table = partial(_file, takes_table=True)
_files_only = partial(_option, goes_with=("a file",))
_tables_only = partial(_option, goes_with=("a file", "a dataset of the Hub"))
_lora_only = partial(_option, needs="--lora-rank 8")
_selects_steps = partial(_option, selects_steps=True)
_saved_with_model = partial(_option, saved_with_model=True)

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
    """Texts, labels and splits.

    Attributes:
        data: A table (.csv, .jsonl, .parquet, .xlsx or others, also compressed or zipped); a folder
            of tables, or with one folder of texts per class; hub:OWNER/NAME[:PART][@REVISION] on
            the Hugging Face Hub; trec (downloaded); or questions (bundled).
        table: Table to read if --data contains several: a file in a folder or zip, a sheet or a
            JSON key.
        validation_file: File with the validation split. Default: rows of --data.
        test_file: File with the test split. Default: 10% of the rows.
        text_column: Text column, or several, such as title,body. Default: guessed.
        text_pair_column: For sentence pairs, the column with the second text. Default: guessed from
            its name.
        label_column: Label column, or several indicator (0/1) columns, such as joy,fear. Default:
            guessed.
        task: single (one class per text), multi (multi-label), regression, or auto (guessed).
        encoding: Encoding, such as gb18030. Default: detected.
        header: Whether the first row contains column names. Default: detected.
        split_column: Column that assigns each row to a split; none ignores it. Default: guessed.
        label_names: File with class names, one per line.
        skip_unknown_labels: Skip validation and test rows whose label never occurs in training.
        empty_labels: Multi-label: an empty cell means unlabeled (the row is skipped) or none of the
            classes.
        unlabeled: File of unlabeled texts that few-shot training also learns from, ideally the
            texts to classify later; none ignores unlabeled rows. Default: the rows of --data
            without a label.
        classes: Names of all classes, such as billing,refund. The table then needs no labels.
        class_names: Few-shot training: auto also trains on the class names if half of them are
            similar to the texts of their class; off never does.
        class_descriptions: File with one class and its description, or an example that you make up,
            per row. Descriptions replace the class names.
        corrections: The suspects.csv from finetune data audit, with your decisions on labels.
        label_map: File that renames or merges labels: one label and its new name per row.
        data_dir: Folder with the raw TREC files.
        label: TREC labels: label-coarse (6 classes) or label-fine (50 classes).
        max_train_samples: Train on only N rows: a stratified sample or, for TREC, the first N rows.
        validation_fraction: Fraction of rows to hold out for validation. Default: 0.1; 0 for fewer
            than 1,000 rows, unless the data is multi-label.
        test_fraction: Fraction of rows to hold out for testing if the data has no test split.
        split_seed: Random seed for choosing the held-out rows.
        private_data: Mark the texts as private: finetune push then doesn't upload the report
            without --allow-private-data.
    """

    data: str = _option(
        "trec",
        path="file",
        takes_table=True,
        names=("trec", "questions"),
        other_names="dataset_name train_file dataset train",
    )
    table: str | None = _files_only(None, other_names="member")
    validation_file: str | None = _files_only(None, path="file", takes_table=True)
    test_file: str | None = _files_only(None, path="file", takes_table=True, is_first=True)
    text_column: str | None = _tables_only(None, is_first=True, other_names="text")
    text_pair_column: str | None = _tables_only(None)
    label_column: str | None = _tables_only(None, is_first=True, other_names="labels target")
    task: str = "auto"
    encoding: str | None = _tables_only(None)
    header: bool | None = _tables_only(None)
    split_column: str | None = _tables_only(None)
    label_names: str | None = _tables_only(None, path="file")
    skip_unknown_labels: bool = _tables_only(False)
    empty_labels: Literal["unlabeled", "none"] | None = _tables_only(None)
    unlabeled: str | None = _file_or_table(None, names=("none",), other_names="unlabelled")
    classes: str | None = _files_only(None, other_names="candidate_labels")
    class_names: Literal["auto", "off"] = "auto"
    class_descriptions: str | None = _file_or_table(None)
    corrections: str | None = _file(None)
    label_map: str | None = _file(None)
    data_dir: str | None = _trec_only(None, path="dir")
    label: Literal["label-coarse", "label-fine"] = _trec_only("label-coarse")
    max_train_samples: PositiveInt | None = None
    validation_fraction: HalfOpenUnitInterval | None = _option(
        None, other_names="val_split val_size validation_split"
    )
    test_fraction: Annotated[float, Gt(0.0), Lt(1.0)] = _option(
        0.1, other_names="test_size test_split"
    )
    split_seed: Seed = 0
    private_data: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The pretrained model, and which of its parameters are trained.

    Attributes:
        model: Text encoder: a Hub ID, a folder, or minilm, which the offline extra includes.
        revision: Branch, tag or commit of the model on the Hub.
        from_scratch: Allow missing encoder weights; they are initialized randomly.
        freeze_core: Freeze the encoder and fit a linear head on the mean of its token features.
        head: Part of the head to train. classifier freezes the encoder, like --freeze-core; with
            --fit-head off it also freezes a pretrained pooler.
        train_layers: Train only the last N layers and the head.
        lora_rank: Freeze the encoder; train the output layer and LoRA adapters of this rank, such
            as 8.
        lora_alpha: Scale LoRA updates by alpha / rank. Default: twice the rank.
        lora_dropout: Dropout before the LoRA adapters.
        lora_targets: Layers with adapters: attention, all-linear (auto), or names such as
            query,value.
        pooling: Head input: the first token (cls) or the mean of all tokens. auto means the mean if
            a linear head is fitted without LoRA, otherwise what the pretrained model uses.
        max_length: Maximum tokens per text.
        long_texts: Texts longer than --max-length: drop the end, or read everything in overlapping
            windows.
        stride: Tokens that consecutive windows of a text share.
    """

    model: str = _first(
        "bert-base-uncased",
        path="dir",
        names=("minilm",),
        is_guessed=True,
        other_names="model_name_or_path",
    )
    revision: str | None = None
    from_scratch: bool = False
    freeze_core: bool = _first(False, other_names="freeze freeze_encoder")
    head: Literal["whole", "classifier"] = "whole"
    train_layers: PositiveInt | None = _first(None)
    lora_rank: PositiveInt | None = _option(None, other_names="lora lora_r")
    lora_alpha: PositiveInt | None = _lora_only(None)
    lora_dropout: HalfOpenUnitInterval = _lora_only(0.0)
    lora_targets: str = _lora_only("auto")
    pooling: Pooling = "auto"
    max_length: Annotated[int, Ge(3), Lt(2**31)] = _first(
        128, is_guessed=True, saved_with_model=True, other_names="max_seq_length"
    )
    long_texts: Literal["truncate", "windows"] = _saved_with_model("truncate")
    stride: NonNegativeInt = _saved_with_model(32, needs="--long-texts windows")

    @property
    def window_stride(self) -> int | None:
        """Overlap in tokens between windows of a long text, or None if texts are truncated."""
        return self.stride if self.long_texts == "windows" else None

    @property
    def mode(self) -> Mode:
        """Which parameters are trained."""
        return Mode.of(self)

    @property
    def lora(self) -> Lora | None:
        """The LoRA adapters, in a LoRA mode."""
        if self.lora_rank is None or not self.mode.is_lora:
            return None
        alpha = self.lora_alpha or 2 * self.lora_rank
        return Lora(self.lora_rank, alpha, self.lora_dropout, self.lora_targets)


@dataclass(frozen=True)
class TrainingConfig:
    """How the model is trained.

    Attributes:
        device: Device to use; auto prefers cuda, then mps, then cpu.
        precision: Precision of the forward pass (autocast); weights stay fp32. auto means bf16 on a
            CUDA GPU that supports it, the faster of bf16 and fp32 on cpu, and fp32 on mps unless
            finetune doctor --parity passed in bf16.
        batch_size: Examples per forward and backward pass; auto finds the fastest that fits.
        check_device: Before training, compare a GPU with the CPU on a few examples. Default: on for
            mps.
        gradient_checkpointing: Recompute activations to save memory. Default: off, unless
            --batch-size auto turns it on.
        effective_batch_size: Examples per optimizer step; gradients are accumulated. Default: the
            batch size.
        eval_batch_size: Examples per forward pass in evaluation; runs on mps use --batch-size
            instead.
        learning_rate: Peak learning rate; selects gradient descent. Default: depends on the model.
        head_lr_multiplier: Learning-rate multiplier for the head. Default: 10; 1 with LoRA or a
            frozen encoder.
        num_train_epochs: Passes over the training split; selects gradient descent. Default: 3, more
            for few rows, up to 100 with a frozen encoder.
        max_steps: Stop after N steps instead of epochs; selects gradient descent.
        warmup_fraction: Fraction of steps used for learning-rate warmup.
        weight_decay: Decoupled weight decay. Default: 0.01; 0 with LoRA or a frozen encoder.
        max_grad_norm: Clip gradients to this norm.
        class_weights: balanced weights the loss of each class by its inverse frequency.
        contrastive: Few-shot training: train the encoder with a supervised contrastive loss, then
            fit a linear head. auto means on for at most 100 rows per class on average.
        fit_head: Fit the head as a logistic regression instead of training it with gradient
            descent. auto means on with a frozen encoder and after few-shot training.
        loss: Classification loss; focal puts less weight on easy examples.
        focal_gamma: Focal loss exponent; 0 is cross-entropy.
        label_smoothing: Fraction of the target probability that is spread evenly over all classes.
        metric_for_best_model: Validation metric that selects the checkpoint to keep, such as
            macro_f1, mcc or loss. Default: accuracy; micro_f1 for multi-label; pearson for
            regression.
        early_stopping_patience: Stop after N validations without improvement; 0 means never.
            Default: 0, 8 for few rows, up to 30 with a frozen encoder.
        calibrate: Calibrate the predicted probabilities (temperature scaling).
        seed: Random seed for new weights, data order and dropout.
    """

    device: DeviceName = _resumable(
        "auto", is_first=True, other_names="no_cuda use_cpu gpu cuda mps cpu"
    )
    precision: PrecisionName = _saved_with_model("auto", other_names="bf16 fp16")
    batch_size: PositiveInt | Literal["auto"] = _resumable(
        DEFAULT_BATCH_SIZE, is_first=True, other_names="per_device_train_batch_size"
    )
    check_device: bool | None = _resumable(None)
    gradient_checkpointing: bool | None = _resumable(None)
    effective_batch_size: PositiveInt | None = _option(
        None, other_names="gradient_accumulation_steps"
    )
    eval_batch_size: PositiveInt = _saved_with_model(64, resumable=True)
    learning_rate: PositiveFloat | None = _selects_steps(None, is_first=True, other_names="lr")
    head_lr_multiplier: PositiveFloat | None = None
    num_train_epochs: PositiveFloat | None = _selects_steps(
        None, is_first=True, other_names="epochs"
    )
    max_steps: PositiveInt | None = _selects_steps(None)
    warmup_fraction: UnitInterval = _option(0.1, other_names="warmup_steps")
    weight_decay: NonNegativeFloat | None = None
    max_grad_norm: PositiveFloat = 1.0
    class_weights: Literal["none", "balanced"] = "none"
    contrastive: Switch = "auto"
    fit_head: Switch = _option("auto", other_names="solve_head")
    loss: Literal["cross_entropy", "focal"] = "cross_entropy"
    focal_gamma: NonNegativeFloat = _option(2.0, needs="--loss focal")
    label_smoothing: HalfOpenUnitInterval = _option(0.0, other_names="label_smoothing_factor")
    metric_for_best_model: str | None = None
    early_stopping_patience: NonNegativeInt | None = _option(None, other_names="patience")
    calibrate: bool = True
    seed: Seed = _first(42)

    @property
    def examples_per_step(self) -> int:
        """The effective batch size. With ``--batch-size auto``, it is the default batch size."""
        if self.effective_batch_size is not None:
            return self.effective_batch_size
        return DEFAULT_BATCH_SIZE if self.batch_size == "auto" else self.batch_size

    @property
    def precision_without_timing(self) -> Precision:
        """The precision if speed isn't measured, as for another Mac: fp32 for ``auto``."""
        return "fp32" if self.precision == "auto" else self.precision


@dataclass(frozen=True)
class OutputConfig:
    """The run folder, and how often progress is reported and saved.

    Attributes:
        output_dir: Folder to write. Default: a new folder in runs/.
        overwrite: Replace earlier results in --output-dir; other files are kept.
        logging_steps: Report the training loss every N steps.
        report_to: Experiment tracker that also receives losses and validation metrics.
        save_strategy: When to write checkpoints: time (at most 3% of the training time), epoch,
            steps, or no (only if the run is stopped). Default: time; steps with --save-steps.
        save_steps: Write a checkpoint every N steps. Default: 500 with --save-strategy steps.
        save_total_limit: Keep the N newest checkpoints; each includes the best model so far.
    """

    output_dir: str | None = _first(None, path="dir", other_names="output out")
    overwrite: bool = _first(False)
    logging_steps: PositiveInt = _resumable(10)
    report_to: Tracker = _resumable("none")
    save_strategy: SaveStrategy | None = _resumable(None)
    save_steps: PositiveInt | None = _resumable(None)
    save_total_limit: PositiveInt = _resumable(2)

    @property
    def saves(self) -> SaveStrategy:
        """When checkpoints are written."""
        return self.save_strategy or ("steps" if self.save_steps else "time")


@dataclass(frozen=True)
class CacheConfig:
    """Whether and where frozen-layer features are stored.

    Attributes:
        feature_cache: Store frozen-layer features for later runs.
        cache_dir: Folder for stored features. Default: assets/finetune in HF_HOME.
        cache_gib: Size limit of stored features in GiB; the least recently used are deleted.
    """

    feature_cache: bool = _resumable(True)
    cache_dir: str | None = _resumable(None, path="dir")
    cache_gib: PositiveFloat = _resumable(10.0)


@dataclass(frozen=True)
class SearchConfig:
    """The batch-size search, in ``find-batch`` and with ``--batch-size auto``.

    Attributes:
        memory: Memory to use, such as 4GiB. Default: all free memory.
        time_limit: Maximum seconds per batch-size search, for each device and mode.
    """

    memory: str | None = _option(None, other_names="memory_limit")
    time_limit: PositiveFloat = 300.0


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


def flag_of(name: str) -> str:
    """Return the command-line flag of an option, such as ``--max-length``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """An option, as declared by its field."""

    section: str
    name: str
    type: Any
    default: Any
    description: str
    resumable: bool = False  # can change when a run resumes
    path: Literal["", "file", "dir"] = ""
    names: tuple[str, ...] = ()  # keywords that are not paths
    takes_table: bool = False  # in Python, accepts a table in memory
    goes_with: tuple[str, ...] = ()  # data sources that it applies to; empty for all
    needs: str = ""  # the option without which it has no effect
    is_first: bool = False  # listed by --help, not only by --help-all
    is_guessed: bool = False  # for a table on the command line
    selects_steps: bool = False  # setting it selects gradient descent
    saved_with_model: bool = False  # stored in inference.json, which is copied with the model
    other_names: str = ""  # names in transformers and other tools

    @property
    def flag(self) -> str:
        """Flag on the command line."""
        return flag_of(self.name)

    @property
    def purpose(self) -> str:
        """First sentence of the help."""
        return self.description.partition(". ")[0].rstrip(".")

    @property
    def is_path(self) -> bool:
        """Whether the value is a local file or folder, or one of ``names``."""
        return bool(self.path) and self.name not in ("data", "model")

    def value_in(self, config: Config) -> Any:
        """Return the option's value in a configuration."""
        return getattr(getattr(config, self.section), self.name)


def help_of(documented: Any) -> dict[str, str]:
    """Parse the help of each argument or attribute from a docstring."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", str(getdoc(documented)), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


OPTIONS: dict[str, Option] = {
    option.name: Option(section, option.name, hint, option.default, text, **option.metadata)
    for section, kind in get_type_hints(Config).items()
    for option, hint, text in zip(
        fields(kind),
        get_type_hints(kind, include_extras=True).values(),
        help_of(kind).values(),
        strict=True,
    )
}
OPTION_BY_OTHER_NAME = {
    other: option.name for option in OPTIONS.values() for other in option.other_names.split()
}


@dataclass(frozen=True)
class AutoTunedOption:
    """A value chosen by measuring a quantity, such as ``ms per step``, for several values."""

    subject: str
    value: str
    quantity: str
    measured: Mapping[str, float]
    note: str = ""


def change_options(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with these options changed."""
    for name, value in values.items():
        section = OPTIONS[name].section
        changed: Any = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config
