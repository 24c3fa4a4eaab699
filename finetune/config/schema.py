"""Every option of a run, with its default, its range and its help: the only home of defaults.

The command line, the YAML files, the environment variables and the Python API are made from these
classes. Names are unique over all sections, so that ``--max-length`` needs no section in front.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from finetune.config.mode import Mode
from finetune.devices.names import DeviceName, Precision, PrecisionName
from finetune.tokenization.long_texts import Handling, LongTexts, Pooling

DEFAULT_BATCH_SIZE = 32


def _option(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


# The upper bounds refuse what would overflow in kernels, timeouts or byte counts later.
Count = Annotated[int, Ge(1), Lt(2**31)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Tracker = Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]
Positive = Annotated[float, Gt(0.0), Le(1e6)]


@dataclass(frozen=True)
class DataConfig:
    """Which texts, which labels, and how they are split."""

    data: str = _option(
        "trec",
        "trec; questions (part of the package); a .csv, .tsv, .jsonl, .parquet or .xlsx file, also "
        "in a .gz or .zip; a folder of text files in folders of classes; or hub:OWNER/NAME, "
        "optionally with :PART and @REVISION, for a data set of the Hub.",
    )
    validation_file: str | None = _option(
        None, "Validation split of data from a file. Default: held out from the training rows."
    )
    test_file: str | None = _option(
        None, "Test split of data from a file. Default: held out from the rows of the file."
    )
    text_column: str | None = _option(
        None,
        "Column of the texts in files and data sets of the Hub, by name or number; of several, "
        "title,body, the texts are joined by a line end. Default: guessed and reported.",
    )
    text_pair_column: str | None = _option(
        None,
        "Column of the second text of pairs. Default: found by well-known names such as sentence1 "
        "and sentence2, if --text-column is not given.",
    )
    label_column: str | None = _option(
        None,
        "Column of the labels; several columns of 0 and 1 with commas between their names. "
        "Default: guessed and reported.",
    )
    task: str = _option(
        "auto",
        "Kind of the labels: single (one class a text), multi (any number of classes), "
        "regression (a number), or auto, which finds it from their column and reports it.",
    )
    encoding: str | None = _option(
        None, "Encoding of text files, such as gb18030. Default: detected, and printed."
    )
    header: bool | None = _option(
        None, "Whether the first row of CSV and TSV names the columns. Default: detected."
    )
    split_column: str | None = _option(
        None,
        "Column that says whether a row is of the train, validation or test split; none for no "
        "column. Default: found by its name, such as split, and its values.",
    )
    label_names: str | None = _option(
        None, "File with the name of a class on each line, for labels that are their numbers."
    )
    skip_unknown_labels: bool = _option(
        False, "Skip rows of other splits whose label no training row has, instead of refusing."
    )
    data_dir: str | None = _option(
        None, "Folder with TREC's raw files, train_5500.label and TREC_10.label."
    )
    label: str = _option(
        "label-coarse", "Labels of TREC: label-coarse (6 classes) or label-fine (50 classes)."
    )
    max_train_samples: Count | None = _option(
        None, "Train on N rows: of TREC the first, else a random sample of every class."
    )
    validation_fraction: Annotated[float, Ge(0.0), Lt(1.0)] = _option(
        0.1, "Fraction of the training rows held out for validation; 0 for none."
    )
    test_fraction: Annotated[float, Gt(0.0), Lt(1.0)] = _option(
        0.1, "Fraction of the rows held out as test split where the data has none."
    )
    split_seed: Seed = _option(0, "Random seed of the held-out splits.")
    private_data: bool = _option(
        False, "Mark the data as private: finetune push refuses the report, which shows texts."
    )


@dataclass(frozen=True)
class ModelConfig:
    """Which pretrained model, and which part of it trains."""

    model: str = _option(
        "bert-base-uncased", "Hub id or folder of a text encoder, or minilm (works offline)."
    )
    revision: str | None = _option(None, "Branch, tag or commit of the model on the Hub.")
    from_scratch: bool = _option(
        False, "Accept a model most of whose weights are missing; they start at random."
    )
    freeze_core: bool = _option(
        False, "Freeze the encoder, embeddings and layers; only the head trains."
    )
    head: Literal["whole", "classifier"] = _option(
        "whole", "Part of the head that trains; classifier freezes a pretrained pooler too."
    )
    train_layers: Count | None = _option(
        None, "Train only the last N layers of the encoder, and the head."
    )
    max_length: Annotated[int, Ge(3), Lt(2**31)] = _option(
        128, "Maximum length of a text in tokens; the rest is truncated."
    )
    long_texts: Handling = _option(
        "truncate",
        "Texts longer than --max-length: truncate cuts off their end, head-tail their middle; "
        "windows reads them whole, as windows that overlap.",
    )
    stride: Annotated[int, Ge(0), Lt(2**31)] = _option(
        32, "Tokens of overlap between the windows of a text."
    )
    pooling: Pooling = _option("mean", "How the logits of a text's windows become the text's.")


@dataclass(frozen=True)
class TrainingConfig:
    """How the parameters are updated."""

    device: DeviceName = _option("auto", "Device to train on; auto takes cuda, then mps, then cpu.")
    precision: PrecisionName = _option(
        "auto",
        "Precision of the forward pass (autocast); the weights stay fp32. auto times fp32 and bf16 "
        "at the start of a run; on mps it is fp32 unless finetune doctor --parity has passed in "
        "bf16.",
    )
    batch_size: Count | Literal["auto"] = _option(
        DEFAULT_BATCH_SIZE,
        "Examples per forward and backward pass on the device; auto searches for the fastest "
        "that fits.",
    )
    check_device: bool = _option(
        True,
        "Compare a GPU with the CPU on a few examples now and then, and stop if it computes "
        "wrongly.",
    )
    gradient_checkpointing: bool | None = _option(
        None,
        "Compute the layers again in the backward pass, which takes less memory and more time. "
        "Default: off; batch size auto switches it on where that is faster.",
    )
    effective_batch_size: Count | None = _option(
        None,
        "Examples per step; a multiple of the batch size uses gradient accumulation. "
        "Default: batch size.",
    )
    eval_batch_size: Count = _option(
        64,
        "Examples per forward pass in evaluation and prediction. On mps a run evaluates with the "
        "batch size of training.",
    )
    optimizer: Literal["adamw", "adafactor"] = _option(
        "adamw", "Optimizer; adafactor's state takes next to no memory."
    )
    learning_rate: Positive | None = _option(
        None, "Peak learning rate. Default: by mode and hidden size, and reported."
    )
    head_lr_multiplier: Positive | None = _option(
        None,
        "Learning rate of the head as a multiple of the encoder's. Default: 10, 1 for a head "
        "alone.",
    )
    num_train_epochs: Positive | None = _option(
        None,
        "Passes over the training split. Default: 3, more for few rows; for a head alone 100, "
        "fewer for many rows.",
    )
    max_steps: Count | None = _option(None, "Stop after N steps; overrides the number of epochs.")
    warmup_fraction: Annotated[float, Ge(0.0), Le(1.0)] = _option(
        0.1, "Fraction of the steps in which the learning rate rises to its peak."
    )
    weight_decay: Annotated[float, Ge(0.0), Le(1e6)] | None = _option(
        None, "Decoupled weight decay; not on biases and norms. Default: 0.01, 0 for a head alone."
    )
    max_grad_norm: Positive = _option(1.0, "Gradients are clipped to this norm.")
    class_weights: Literal["none", "balanced"] = _option(
        "none",
        "balanced weights the loss of each class by the inverse of its frequency; where a text may "
        "have several, all rows with a class count as much as all rows without it.",
    )
    metric_for_best_model: str | None = _option(
        None,
        "Validation metric that selects the model to keep: accuracy, macro_f1 or loss; for "
        "several classes a text micro_f1 and others; for numbers pearson, spearman or mae. "
        "Default: accuracy, micro_f1 or pearson.",
    )
    early_stopping_patience: Annotated[int, Ge(0), Lt(2**31)] | None = _option(
        None,
        "Stop after N validations without improvement; 0 for never. Default: 0; 8 for few rows; "
        "for a head alone 30, fewer for many rows.",
    )
    calibrate: bool = _option(
        True,
        "Divide the last layer by a temperature fitted on the validation rows (from 100 rows and 5 "
        "wrong answers on), so that the probabilities say how often answers are right; the answers "
        "stay the same.",
    )
    seed: Seed = _option(42, "Random seed of the new head, the order of the examples and dropout.")


@dataclass(frozen=True)
class OutputConfig:
    """Where the results go and how often progress is reported and saved."""

    output_dir: str | None = _option(
        None, "Run folder. Default: a new folder runs/DATA-MODEL-MODE."
    )
    overwrite: bool = _option(False, "Delete the contents of the run folder and start over.")
    logging_steps: Count = _option(10, "Report the training loss every N steps.")
    report_to: Tracker = _option(
        "none",
        "Tracker that gets the loss, the validations and the hyperparameters too; tensorboard "
        "writes them into the run folder.",
    )
    save_strategy: Literal["epoch", "no"] = _option(
        "epoch",
        "epoch writes a checkpoint after every epoch, and as --save-minutes and --save-steps say; "
        "no only where the run is stopped.",
    )
    save_minutes: Annotated[float, Ge(0.0), Le(1e6)] = _option(
        10.0, "Write a checkpoint every N minutes too; 0 for never."
    )
    save_steps: Count | None = _option(None, "Write a checkpoint every N steps too.")
    save_total_limit: Count = _option(
        2, "Keep the N newest checkpoints; that of the best model is kept in any case."
    )


@dataclass(frozen=True)
class CacheConfig:
    """Whether and where the features of frozen layers are stored."""

    feature_cache: bool = _option(
        True,
        "Compute the features of the frozen layers once and store them, and the token ids of large "
        "tables; if off, they are computed at every step, and texts are encoded in every run.",
    )
    cache_dir: str | None = _option(
        None,
        "Folder of stored features, token ids and batch sizes. Default: finetune in the Hub's "
        "assets cache.",
    )
    cache_gib: Positive = _option(
        10.0,
        "Maximum size of stored features and token ids in GiB; the least recently used are deleted "
        "first.",
    )


@dataclass(frozen=True)
class SearchConfig:
    """How a batch size is searched for, by ``find-batch`` and by ``--batch-size auto``."""

    memory_limit: str | None = _option(
        None, "Maximum memory that a batch may use, such as 4GiB. Default: what is free."
    )
    time_limit: Positive = _option(300.0, "Maximum seconds of the search for each device and mode.")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


SECTION_OF_OPTION: dict[str, str] = {
    option.name: name
    for name, section in get_type_hints(Config).items()
    for option in fields(section)
}

# Those whose values are names of files and folders; of data and models they may be.
PATH_OPTIONS = frozenset(
    {"data_dir", "validation_file", "test_file", "label_names", "output_dir", "cache_dir"}
)


def value_of(config: Config, option: str) -> Any:
    """Return the value of an option, whose section its name implies."""
    return getattr(getattr(config, SECTION_OF_OPTION[option]), option)


def change_options(config: Config, change: Callable[[str, Any], Any]) -> Config:
    """Return a configuration whose values are what a function returns for option and value."""
    sections = {
        name: replace(section, **{one: change(one, value) for one, value in vars(section).items()})
        for name, section in vars(config).items()
    }
    return replace(config, **sections)


def long_texts_of(model: ModelConfig) -> LongTexts:
    """Return what becomes of texts longer than the maximum."""
    return LongTexts(model.long_texts, stride=model.stride, pooling=model.pooling)


def mode_of(model: ModelConfig) -> Mode:
    """Return what trains."""
    if model.head == "classifier":
        return Mode("classifier")
    if model.train_layers is not None:
        return Mode(f"last-{model.train_layers}")
    return Mode("head" if model.freeze_core else "full")


def effective_batch_size(training: TrainingConfig) -> int:
    """Return the examples per step; for batch size auto, those of the default batch size."""
    if training.effective_batch_size is not None:
        return training.effective_batch_size
    return DEFAULT_BATCH_SIZE if training.batch_size == "auto" else training.batch_size


def precision_without_timing(training: TrainingConfig) -> Precision:
    """Return the precision of what is not timed, such as a search for batch sizes."""
    return "fp32" if training.precision == "auto" else training.precision


# BERT-base's pooler ends in a tanh that is mostly far from 0.
TYPICAL_OUTPUT_LAYER_INPUT = 0.7


def default_learning_rate(mode: Mode, *, hidden_size: int, output_layer_input: float) -> float:
    """Return the peak learning rate for a mode.

    For an encoder it is 5e-5 at BERT-base's hidden size of 768, the article's rate, and inversely
    proportional to the hidden size (1e-4 at 384); for a new head 5e-4. For a classifier alone it is
    inversely proportional to the root mean square of its input, 0 if unknown: that from MiniLM's
    pooler is a tenth of BERT-base's, and one rate for both costs the other 3 points of accuracy.
    """
    if mode == "classifier":
        return float(f"{7e-3 / (output_layer_input or TYPICAL_OUTPUT_LAYER_INPUT):.2g}")
    if mode == "head":
        return 5e-4
    return 5e-5 * 768 / hidden_size


@dataclass(frozen=True)
class ModeDefaults:
    """What an option that is not given is in a mode; as they are here, if the encoder trains.

    Beside an encoder, which is pretrained, a new head takes ten times its learning rate: on TREC
    half a point of accuracy over 10 splits, the same with 5 and 20 (``docs/LOG.md``).
    """

    num_train_epochs: float = 3.0
    head_lr_multiplier: float = 10.0
    weight_decay: float = 0.01
    early_stopping_patience: int = 0


# A head over stored features is trained until it improves no more: the epochs are a maximum.
HEAD_DEFAULTS = ModeDefaults(
    num_train_epochs=100.0, head_lr_multiplier=1.0, weight_decay=0.0, early_stopping_patience=30
)
# Those of 100 epochs of TREC. More rows need fewer epochs, and have a validation in each.
MAX_UPDATES_OF_A_HEAD = 14_000


# Few rows need more epochs: with at least so many steps, five sets of 150 to 1,000 rows came
# within a point of the best of 3, 10, 20 and 40 epochs; TREC has that many in three (docs/LOG.md).
MIN_UPDATES = 250
MAX_EPOCHS_OF_FEW_ROWS = 40
PATIENCE_OF_FEW_ROWS = 8


def mode_defaults(mode: Mode, *, steps_per_epoch: int) -> ModeDefaults:
    """Return the defaults that depend on the mode, the learning rate aside, and on the rows."""
    if not mode.trains_encoder:
        return _head_defaults(steps_per_epoch)
    epochs = float(min(math.ceil(MIN_UPDATES / steps_per_epoch), MAX_EPOCHS_OF_FEW_ROWS))
    if epochs <= ModeDefaults.num_train_epochs:
        return ModeDefaults()
    return ModeDefaults(num_train_epochs=epochs, early_stopping_patience=PATIENCE_OF_FEW_ROWS)


def _head_defaults(steps_per_epoch: int) -> ModeDefaults:
    epochs = max(1, min(MAX_UPDATES_OF_A_HEAD // steps_per_epoch, HEAD_DEFAULTS.num_train_epochs))
    share = epochs / HEAD_DEFAULTS.num_train_epochs
    patience = math.ceil(share * HEAD_DEFAULTS.early_stopping_patience)
    return replace(HEAD_DEFAULTS, num_train_epochs=epochs, early_stopping_patience=patience)
