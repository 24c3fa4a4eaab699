"""Every option of a run, with its default, its range and its help: the only home of defaults.

The command line, ``--help``, the YAML files, the environment variables and the Python API are all
made from these classes. The names are unique over all sections, so that ``--max-length`` needs no
section in front.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from finetune.devices.names import DeviceName, PrecisionName
from finetune.model.mode import Mode

STRICT = {"extra": "forbid", "allow_inf_nan": False}
DEFAULT_BATCH_SIZE = 32


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


Fraction = Annotated[float, Ge(0.0), Lt(1.0)]
Count = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class DataConfig:
    """Which texts, which labels, and how they are split."""

    __pydantic_config__ = STRICT

    data: str = _option(
        "trec",
        "trec; questions (shipped with the package); a .csv, .tsv, .jsonl or .parquet file; or "
        "hub:OWNER/NAME, maybe with @REVISION, for files on the Hub.",
    )
    validation_file: str | None = _option(
        None, "Validation split for data from a file. Default: training rows are held out."
    )
    test_file: str | None = _option(
        None, "Test split for data from a file. Default: rows of the file are held out."
    )
    text_column: str | None = _option(
        None, "Column of the texts in files and sets of the Hub. Default: guessed, and printed."
    )
    label_column: str | None = _option(
        None, "Column of the classes, words or numbers. Default: guessed, and printed."
    )
    data_dir: str | None = _option(
        None, "Folder with TREC's raw files, train_5500.label and TREC_10.label."
    )
    label: str = _option("label-coarse", "TREC's classes: label-coarse (6) or label-fine (50).")
    max_train_samples: Count | None = _option(
        None, "Train on the first N rows of the training split only."
    )
    validation_fraction: Fraction = _option(
        0.1, "Share of the training rows held out to choose the best model; 0 for none."
    )
    test_fraction: Annotated[float, Gt(0.0), Lt(1.0)] = _option(
        0.1, "Share of the rows held out as test split where the data brings none."
    )
    split_seed: Annotated[int, Ge(0)] = _option(0, "Seed of the held-out splits alone.")


@dataclass(frozen=True)
class ModelConfig:
    """Which pretrained model, and which part of it trains."""

    __pydantic_config__ = STRICT

    model: str = _option(
        "bert-base-uncased", "Hub id or folder of a text encoder, or minilm (works offline)."
    )
    revision: str | None = _option(None, "Branch, tag or commit of the model on the Hub.")
    freeze_core: bool = _option(
        False, "Freeze the pretrained core, embeddings and layers; only the head trains."
    )
    head: Literal["whole", "classifier"] = _option(
        "whole", "What of the head trains; classifier freezes the core and the pooler too."
    )
    train_layers: Count | None = _option(
        None, "Train only the last N layers of the core, and the head."
    )
    max_length: Annotated[int, Ge(3)] = _option(128, "Longest text in tokens; the rest is cut.")


@dataclass(frozen=True)
class TrainingConfig:
    """How the parameters are updated."""

    __pydantic_config__ = STRICT

    device: DeviceName = _option("auto", "Device to train on; auto takes cuda, then mps, then cpu.")
    precision: PrecisionName = _option(
        "fp32", "Number format of the arithmetic; the weights stay fp32."
    )
    batch_size: Count | Literal["auto"] = _option(
        DEFAULT_BATCH_SIZE,
        "Rows in one forward and backward on the device; auto looks for the fastest that fits.",
    )
    effective_batch_size: Count | None = _option(
        None, "Rows in one update; a multiple of the batch size accumulates. Default: batch size."
    )
    eval_batch_size: Count = _option(64, "Rows in one forward of evaluation and prediction.")
    learning_rate: Annotated[float, Gt(0.0)] | None = _option(
        None, "Peak learning rate. Default: by mode and width of the model, and printed."
    )
    head_lr_multiplier: Annotated[float, Gt(0.0)] | None = _option(
        None, "The head's learning rate over the core's. Default: 10 if the core trains too."
    )
    num_train_epochs: Annotated[float, Gt(0.0)] | None = _option(
        None, "Passes over the training split. Default: by mode, and printed."
    )
    max_steps: Count | None = _option(None, "Stop after N updates, whatever the epochs say.")
    warmup_fraction: Annotated[float, Ge(0.0), Le(1.0)] = _option(
        0.1, "Share of the updates in which the learning rate rises to its peak."
    )
    weight_decay: Annotated[float, Ge(0.0)] | None = _option(
        None,
        "Decoupled weight decay; not on biases and norms. Default: 0.01, 0 for a head alone.",
    )
    max_grad_norm: Annotated[float, Gt(0.0)] = _option(
        1.0, "Gradients are scaled down to this norm."
    )
    class_weights: Literal["none", "balanced"] = _option(
        "none", "balanced weighs each class by the inverse of its share."
    )
    metric_for_best_model: Literal["accuracy", "macro_f1", "loss"] = _option(
        "accuracy", "Validation figure that chooses the model to keep."
    )
    early_stopping_patience: Annotated[int, Ge(0)] | None = _option(
        None,
        "Stop after N validations in a row without a better model; 0 for never. Default: 30 for a "
        "head alone, else 0.",
    )
    seed: Annotated[int, Ge(0), Lt(2**32)] = _option(42, "Seed of the new head, order and dropout.")


@dataclass(frozen=True)
class OutputConfig:
    """Where the results go and how much is told on the way."""

    __pydantic_config__ = STRICT

    output_dir: str | None = _option(
        None, "Run folder. Default: a new folder runs/DATA-MODEL-MODE."
    )
    overwrite: bool = _option(False, "Delete what the run folder holds and start anew.")
    logging_steps: Count = _option(10, "Report the loss every N updates.")
    save_strategy: Literal["epoch", "no"] = _option(
        "epoch", "When to keep what resuming needs; Ctrl-C keeps it in any case."
    )


@dataclass(frozen=True)
class CacheConfig:
    """Whether a frozen core runs once, and where what it gives is kept."""

    __pydantic_config__ = STRICT

    feature_cache: bool = _option(
        True, "Run what is frozen once and keep its output; without, it runs at every update."
    )
    cache_dir: str | None = _option(
        None, "Folder of what is kept from run to run. Default: finetune in the Hub's assets cache."
    )
    cache_gib: Annotated[float, Gt(0.0)] = _option(
        10.0,
        "GiB that what frozen cores gave may take; what was not used longest goes first.",
    )


@dataclass(frozen=True)
class SearchConfig:
    """How a batch size is searched for, by ``find-batch`` and by ``--batch-size auto``."""

    __pydantic_config__ = STRICT

    memory_limit: str | None = _option(
        None, "The most memory that a batch may take, such as 4GiB. Default: what is free."
    )
    time_limit: Annotated[float, Gt(0.0)] = _option(
        300.0, "Seconds that the search may take, a device and mode."
    )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    __pydantic_config__ = STRICT

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    search: SearchConfig = field(default_factory=SearchConfig)


SECTION_OF_OPTION: dict[str, str] = {
    option.name: section.name
    for section in fields(Config)
    for option in fields(section.default_factory)  # type: ignore[arg-type]
}


def mode_of(model: ModelConfig) -> Mode:
    """Return what trains."""
    if model.head == "classifier":
        return Mode("classifier")
    if model.train_layers is not None:
        return Mode(f"last-{model.train_layers}")
    return Mode("head" if model.freeze_core else "full")


def effective_batch_size(training: TrainingConfig) -> int:
    """Return the rows in one update; where the batch size is searched for, its default."""
    if training.effective_batch_size is not None:
        return training.effective_batch_size
    return DEFAULT_BATCH_SIZE if training.batch_size == "auto" else training.batch_size


# BERT-base's pooler ends in a tanh that is mostly far from 0.
TYPICAL_CLASSIFIER_INPUT = 0.7


def default_learning_rate(mode: Mode, *, hidden_size: int, classifier_input: float) -> float:
    """Return the peak learning rate for a mode.

    A whole encoder takes 5e-5 at BERT-base's width of 768, the article's rate, and more in
    proportion as it is narrower (1e-4 at 384). A head, which starts from nothing, takes 5e-4. What
    a classifier alone takes goes with the size of its inputs: MiniLM's pooler gives numbers ten
    times as small as BERT-base's, and a rate that suits the one leaves the other 3 points behind.

    Args:
        mode: What trains.
        hidden_size: Width of the core.
        classifier_input: Root mean square of what the classifier reads; 0 if not known.
    """
    if mode == "classifier":
        return float(f"{7e-3 / (classifier_input or TYPICAL_CLASSIFIER_INPUT):.2g}")
    if mode == "head":
        return 5e-4
    return 5e-5 * 768 / hidden_size


def default_head_lr_multiplier(mode: Mode) -> float:
    """Return the head's learning rate over the core's for a mode.

    Beside a core, which has learnt already, ten times its rate brings a new head along: on TREC
    half a point of accuracy over 10 splits, the same with 5 and 20 (``docs/LOG.md``).
    """
    return 10.0 if mode.trains_encoder else 1.0


def default_num_train_epochs(mode: Mode) -> float:
    """Return the passes over the data for a mode.

    A head over a core that ran once trains until it improves no more: these are the most.
    """
    return 3.0 if mode.trains_encoder else 100.0


def default_early_stopping_patience(mode: Mode) -> int:
    """Return after how many validations without a better model a mode stops; 0 for never."""
    return 0 if mode.trains_encoder else 30


def default_weight_decay(mode: Mode) -> float:
    """Return the weight decay for a mode: a head alone stops early instead."""
    return 0.01 if mode.trains_encoder else 0.0
