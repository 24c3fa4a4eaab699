from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, overload

from finetune.batch_finder.results import FoundBatches
from finetune.commands.evaluate import Evaluation
from finetune.config.options import Options
from finetune.devices.names import DeviceName
from finetune.events import Emit
from finetune.runs.compare import Baseline, Comparison
from finetune.runs.results import RunResults
from finetune.runs.seeds import SeedResults
from finetune.tasks.base import Answer

__version__: str

@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: None = None,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> RunResults: ...
@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: int,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> SeedResults: ...
def evaluate(
    run: str | Path,
    *,
    split: str | None = None,
    data: str | Path | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    device: DeviceName = "auto",
    emit: Emit | None = None,
    progress: bool | None = None,
) -> Evaluation: ...
def predict(
    run: str | Path,
    texts: Sequence[str | tuple[str, str]],
    *,
    device: DeviceName = "auto",
    all_scores: bool = False,
    min_confidence: float | None = None,
    target_precision: float | None = None,
    emit: Emit | None = None,
    progress: bool | None = None,
) -> list[Answer]: ...
def compare(
    *runs: str | Path,
    baseline: Baseline = "first",
    rows: int = 10,
    output: str | Path | None = None,
    emit: Emit | None = None,
    progress: bool | None = None,
) -> Comparison: ...
def find_batch(
    config: str | Path | None = None,
    *,
    machine: str | None = None,
    memory: str | None = None,
    limit: int | None = None,
    fresh: bool = False,
    emit: Emit | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> FoundBatches: ...
