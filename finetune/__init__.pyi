from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack, overload

from finetune.batch_finder.results import FoundBatches
from finetune.commands.evaluate import Evaluation
from finetune.commands.predict import LoadedModel
from finetune.devices import DeviceName, Runtime
from finetune.events import Emit
from finetune.runs.compare import Comparison, Reference
from finetune.runs.results import RunResults
from finetune.runs.several import SeveralResults
from finetune.tasks.base import Predictions

__version__: str

AnyPath = str | PathLike[str]

class HasColumns(Protocol):  # a DataFrame
    @property
    def columns(self) -> Any: ...

class HasColumnNames(Protocol):  # a Dataset, a table of Arrow
    @property
    def column_names(self) -> Any: ...

Rows = Iterable[Mapping[str, Any]] | Iterable[tuple[Any, ...]]
Table = HasColumns | HasColumnNames | Mapping[str, Any] | Rows | tuple[Any, Any]

# Takes an EvalPrediction of transformers.
ComputeMetrics = Callable[[Any], Mapping[str, Any]]

# Written by `make types` from the schema.
class Options(TypedDict, total=False):
    data: AnyPath | Table
    table: str | None
    validation_file: AnyPath | Table | None
    test_file: AnyPath | Table | None
    text_column: str | None
    text_pair_column: str | None
    label_column: str | None
    task: str
    encoding: str | None
    header: bool | None
    split_column: str | None
    label_names: AnyPath | None
    skip_unknown_labels: bool
    empty_labels: Literal["unlabeled", "none"] | None
    unlabeled: AnyPath | Table | None
    classes: str | Sequence[str] | None
    class_names: Literal["auto", "off"]
    class_descriptions: AnyPath | Table | None
    corrections: AnyPath | None
    label_map: AnyPath | None
    data_dir: AnyPath | None
    label: Literal["label-coarse", "label-fine"]
    max_train_samples: int | None
    validation_fraction: float | None
    test_fraction: float
    split_seed: int
    private_data: bool
    model: AnyPath
    revision: str | None
    from_scratch: bool
    freeze_core: bool
    head: Literal["whole", "classifier"]
    train_layers: int | None
    lora_rank: int | None
    lora_alpha: int | None
    lora_dropout: float
    lora_targets: str
    pooling: Literal["auto", "cls", "mean"]
    max_length: int
    long_texts: Literal["truncate", "windows"]
    stride: int
    device: Literal["auto", "mps", "cpu", "cuda"]
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    batch_size: int | Literal["auto"]
    check_device: bool | None
    gradient_checkpointing: bool | None
    effective_batch_size: int | None
    eval_batch_size: int
    learning_rate: float | None
    head_lr_multiplier: float | None
    num_train_epochs: float | None
    max_steps: int | None
    warmup_fraction: float
    weight_decay: float | None
    max_grad_norm: float
    class_weights: Literal["none", "balanced"]
    contrastive: Literal["auto", "on", "off"]
    fit_head: Literal["auto", "on", "off"]
    loss: Literal["cross_entropy", "focal"]
    focal_gamma: float
    label_smoothing: float
    metric_for_best_model: str | None
    early_stopping_patience: int | None
    calibrate: bool
    seed: int
    output_dir: AnyPath | None
    overwrite: bool
    logging_steps: int
    report_to: Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]
    save_strategy: Literal["epoch", "time", "no", "steps"] | None
    save_steps: int | None
    save_total_limit: int
    feature_cache: bool
    cache_dir: AnyPath | None
    cache_gib: float
    memory: str | None
    time_limit: float

@overload
def run(
    file: AnyPath | Table | None = None,
    *,
    config: AnyPath | None = None,
    seeds: None = None,
    folds: None = None,
    keep_models: bool = False,
    resume_from_checkpoint: AnyPath | None = None,
    compute_metrics: ComputeMetrics | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> RunResults: ...
@overload
def run(
    file: AnyPath | Table | None = None,
    *,
    config: AnyPath | None = None,
    seeds: int,
    folds: None = None,
    keep_models: bool = False,
    resume_from_checkpoint: AnyPath | None = None,
    compute_metrics: ComputeMetrics | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> SeveralResults: ...
@overload
def run(
    file: AnyPath | Table | None = None,
    *,
    config: AnyPath | None = None,
    seeds: None = None,
    folds: int,
    keep_models: bool = False,
    resume_from_checkpoint: AnyPath | None = None,
    compute_metrics: ComputeMetrics | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> SeveralResults: ...
def evaluate(
    run: AnyPath,
    *,
    split: str | None = None,
    data: AnyPath | Table | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    table: str | None = None,
    encoding: str | None = None,
    evaluate_metric: str | None = None,
    compute_metrics: ComputeMetrics | None = None,
    device: DeviceName = "auto",
    runtime: Runtime = "auto",
    emit: Emit | None = None,
    progress: bool | None = None,
) -> Evaluation: ...
def predict(
    run: AnyPath,
    texts: Iterable[str | tuple[str, str] | None] | Table,
    *,
    device: DeviceName = "auto",
    runtime: Runtime = "auto",
    all_scores: bool = False,
    explain: bool = False,
    min_confidence: float | None = None,
    target_precision: float | None = None,
    emit: Emit | None = None,
    progress: bool | None = None,
) -> Predictions: ...
def load(
    run: AnyPath,
    *,
    device: DeviceName = "auto",
    runtime: Runtime = "auto",
    emit: Emit | None = None,
    progress: bool | None = None,
) -> LoadedModel: ...
def compare(
    *runs: AnyPath | list[Any],
    reference: Reference = "first",
    limit: int = 10,
    emit: Emit | None = None,
    progress: bool | None = None,
) -> Comparison: ...
def find_batch(
    file: AnyPath | Table | None = None,
    *,
    config: AnyPath | None = None,
    machine: str | None = None,
    limit: int | None = None,
    fresh: bool = False,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> FoundBatches: ...
def sweep(
    space: str | Path,
    *,
    trials: int | None = None,
    config: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> SeveralResults: ...
