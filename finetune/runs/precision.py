"""The precision of a run, by a timing of its steps where it is ``auto``."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter

from finetune import hub
from finetune.batch_finder.case import architecture_of
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.batch_size import BatchSize
from finetune.errors import BatchDoesNotFit
from finetune.events import Emit, Info, WarningMessage, ignore
from finetune.files import keep_json, read_json
from finetune.model.tensor_store import key_of
from finetune.runs.cache import cache_folder
from finetune.runs.features import stores_features
from finetune.runs.manifest import package_versions
from finetune.runs.plan import TrainingPlan
from finetune.runs.preparation import Preparation
from finetune.runs.results import AutoTunedOption
from finetune.tokenization.buckets import Batch
from finetune.training.micro_batches import StepPart, cut_batch
from finetune.training.precision_result import PrecisionTiming
from finetune.training.precision_timing import time_precisions

# A timing takes up to 12 batches, mostly 6; fewer than this in all would not make up for them.
MIN_BATCHES = 50


def with_precision(preparation: Preparation, batch_size: BatchSize, *, emit: Emit) -> Preparation:
    """Return a preparation whose precision is fp32 or bf16 in place of ``auto``.

    Where features of frozen layers are stored, it is timed before there are any: a step of the
    whole model goes through the frozen layers, as their extraction does, and through what trains.
    """
    config = preparation.config
    if config.training.precision != "auto":
        return preparation
    reason = _why_not_timed(preparation, batch_size)
    timing = preparation.processes.broadcast(
        lambda: None if reason else _find_timing(preparation, batch_size)
    )
    if timing is None:
        emit(Info(f"precision: fp32, {reason or 'as memory ran out when bf16 was timed'}"))
    else:
        emit(Info(f"precision: {timing.precision}, {timing}; --precision sets another"))
    if timing and not timing.do_results_agree:
        found = f"in bf16 the logits of a batch are off by {timing.logits_error:.0%}"
        remedy = "the run is in fp32; finetune doctor --parity --precision bf16 shows more"
        emit(WarningMessage(found, remedy=remedy))
    training = replace(config.training, precision=timing.precision if timing else "fp32")
    config = replace(config, training=training)
    preparation = replace(preparation, config=config, precision_timing=timing)
    return preparation.with_choices(_describe(timing)) if timing else preparation


def _describe(timing: PrecisionTiming) -> AutoTunedOption:
    milliseconds = {name: 1e3 * one for name, one in timing.seconds.items()}
    error = timing.logits_error
    note = "" if error is None else f"in bf16 the logits of a batch are off by {error:.1%}"
    return AutoTunedOption(
        "precision", timing.precision, f"ms for one {timing.work}", milliseconds, note
    )


def _why_not_timed(preparation: Preparation, batch_size: BatchSize) -> str | None:
    device = preparation.device
    if "bf16" not in device.precisions:
        return f"as {device.name} can't compute in bf16 here"
    if device.has_silent_faults_in_16_bits and not has_parity(device, precision="bf16"):
        parity = f"finetune doctor --parity --device {device.name} --precision bf16"
        return f"as {parity} has not passed on this machine"
    if _batches_of_run(preparation, batch_size) < MIN_BATCHES:
        return "as the run is too short for a timing of bf16 to pay"
    return None


def _batches_of_run(preparation: Preparation, batch_size: BatchSize) -> float:
    """Return how many batches go through the encoder."""
    plan = preparation.plan
    examples = plan.schedule.total_steps * plan.rows_per_step
    mode = preparation.mode
    if stores_features(preparation.config.cache, mode) and not mode.trains_encoder:
        examples = sum(len(split.lengths) for split in preparation.examples.values())
    return examples / batch_size.examples


def _find_timing(preparation: Preparation, batch_size: BatchSize) -> PrecisionTiming | None:
    """Return the timing of an earlier run, or time now; None if memory runs out."""
    plan = preparation.plan
    batch = _typical_batch(plan, batch_size.examples)
    rows = len(plan.examples.sequences_of(batch.indices))
    key = _key(preparation, rows=rows, padded_length=batch.padded_length)
    file = cache_folder(preparation.config.cache, "precision") / f"{key}.json"
    if earlier := _read_timing(file):
        return earlier
    device = preparation.device

    def cut(examples: int) -> Iterator[StepPart]:
        train = preparation.examples["train"]
        return cut_batch(train, batch, batch_size=examples, device=device)

    try:
        timing = time_precisions(
            preparation.text_model.model,
            head=preparation.text_model.structure.head,
            losses=preparation.task.losses,
            hyperparameters=plan.hyperparameters,
            cut=cut,
            batch_size=replace(batch_size, emit=ignore),
        )
    except (BatchDoesNotFit, RuntimeError, MemoryError) as error:
        if not isinstance(error, BatchDoesNotFit) and not device.memory.is_out_of_memory(error):
            raise
        return None
    device.memory.reset_peak()
    keep_json(file, asdict(timing))
    return timing


def _typical_batch(plan: TrainingPlan, most_examples: int) -> Batch:
    """Return a micro-batch of the first epoch, of the median padded length."""
    batches = sorted(plan.batches(0), key=lambda batch: batch.padded_length)
    typical = batches[len(batches) // 2]
    most_texts = max(1, most_examples * plan.effective_batch_size // plan.rows_per_step)
    return Batch(typical.indices[:most_texts], typical.padded_length)


def _read_timing(file: Path) -> PrecisionTiming | None:
    try:
        return TypeAdapter(PrecisionTiming).validate_python(read_json(file))
    except (OSError, ValueError):
        return None


def has_parity(device: Device, *, precision: str) -> bool:
    """Return whether ``doctor --parity`` has passed in a precision, with all that it compared."""
    verdicts = _read_verdicts(_parity_file(device, precision))
    return bool(verdicts) and all(verdicts.values())


def note_parity(device: Device, *, precision: str, subject: str, passes: bool) -> None:
    """Remember whether a device agrees with the CPU in a precision, by what was compared."""
    file = _parity_file(device, precision)
    keep_json(file, _read_verdicts(file) | {subject: passes})


def _read_verdicts(file: Path) -> dict[str, bool]:
    try:
        return TypeAdapter(dict[str, bool]).validate_python(read_json(file))
    except (OSError, ValueError):
        return {}


def _parity_file(device: Device, precision: str) -> Path:
    key = key_of([*_describe_machine(device), f"torch {torch.__version__}", precision])
    return hub.cache_folder("parity") / f"{key}.json"


def _key(preparation: Preparation, *, rows: int, padded_length: int) -> str:
    """Return a key of all that a timing depends on, but for the texts."""
    text_model, options = preparation.text_model, preparation.config.training
    subject = {
        "architecture": architecture_of(text_model.model.config.to_dict()),
        "weights": text_model.source.weights_sha256,
        "mode": preparation.mode,
        "optimizer": options.optimizer,
        "gradient_checkpointing": bool(options.gradient_checkpointing),
        "shape": [rows, padded_length],
        "threads": torch.get_num_threads(),
        "packages": package_versions(),
        "host": platform.node(),
    }
    machine = _describe_machine(preparation.device)
    return key_of([*machine, json.dumps(subject, sort_keys=True)])


def _describe_machine(device: Device) -> tuple[str, ...]:
    return device.description, host.cpu_name(), host.macos_version(), platform.machine()
