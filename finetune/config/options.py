"""Every option of a run by name and type, for type checkers and editors: ``run(**options)``.

A type checker can't read a ``TypedDict`` off the dataclasses of ``schema``; a test compares them.
"""

from os import PathLike
from typing import Literal, TypedDict

from finetune.config.schema import Tracker
from finetune.devices.names import DeviceName, PrecisionName
from finetune.tokenization.long_texts import Handling, Pooling

AnyPath = str | PathLike[str]


class Options(TypedDict, total=False):
    """The options of ``finetune run``, with underscores; what is left out has its default."""

    data: AnyPath
    validation_file: AnyPath | None
    test_file: AnyPath | None
    text_column: str | None
    text_pair_column: str | None
    label_column: str | None
    task: str
    encoding: str | None
    header: bool | None
    split_column: str | None
    label_names: AnyPath | None
    skip_unknown_labels: bool
    data_dir: AnyPath | None
    label: str
    max_train_samples: int | None
    validation_fraction: float
    test_fraction: float
    split_seed: int
    private_data: bool

    model: AnyPath
    revision: str | None
    from_scratch: bool
    freeze_core: bool
    head: Literal["whole", "classifier"]
    train_layers: int | None
    max_length: int
    long_texts: Handling
    stride: int
    pooling: Pooling

    device: DeviceName
    precision: PrecisionName
    batch_size: int | Literal["auto"]
    check_device: bool
    gradient_checkpointing: bool | None
    effective_batch_size: int | None
    eval_batch_size: int
    optimizer: Literal["adamw", "adafactor"]
    learning_rate: float | None
    head_lr_multiplier: float | None
    num_train_epochs: float | None
    max_steps: int | None
    warmup_fraction: float
    weight_decay: float | None
    max_grad_norm: float
    class_weights: Literal["none", "balanced"]
    metric_for_best_model: str | None
    early_stopping_patience: int | None
    calibrate: bool
    seed: int

    output_dir: AnyPath | None
    overwrite: bool
    logging_steps: int
    report_to: Tracker
    save_strategy: Literal["epoch", "no"]
    save_minutes: float
    save_steps: int | None
    save_total_limit: int

    feature_cache: bool
    cache_dir: AnyPath | None
    cache_gib: float

    memory_limit: str | None
    time_limit: float
