"""The batch sizes that suit a model on this machine's devices, or on a Mac that is not here."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import events
from finetune.batch_finder.case import Case, Part, architecture_of
from finetune.batch_finder.estimate import Estimate, estimate
from finetune.batch_finder.find import Answer, Bounds, find_batch
from finetune.batch_finder.outcomes import Outcome
from finetune.config.schema import Config, mode_of
from finetune.config.sizes import parse_size
from finetune.data.trec import LONGEST_TOKENS, TRAINING_ROWS
from finetune.devices.base import Device
from finetune.devices.mps.chips import Mac, find_mac
from finetune.devices.mps.device import MpsDevice
from finetune.devices.select import select_device, usable_devices
from finetune.errors import BatchDoesNotFit, ConfigurationInvalid, ModelUnsupported
from finetune.events import Emit, Stage
from finetune.files import write_json
from finetune.model.load import load_tokenizer
from finetune.model.mode import Mode
from finetune.model.shape import load_shape, most_positions
from finetune.pipeline.features import cache_folder, caches_features, make_feature_extractor
from finetune.pipeline.plan import TrainingPlan
from finetune.pipeline.prepare import Prepared, load_splits
from finetune.report.batches import draw_batches
from finetune.tokenization.encode import encode_texts

SCHEMA_VERSION = 1
DEFAULT_MODES = (Mode("full"), Mode("head"))
# The article padded every text to this length.
ARTICLE_TOKENS = 512
SMALLEST_MEMORY_BYTES = 2**30
TREC = "trec"
_WHOLE: tuple[Part, ...] = ("whole",)
_DIVIDED: tuple[Part, ...] = ("prefix", "suffix")


@dataclass(frozen=True)
class Task:
    """What batch sizes are looked for.

    Args:
        config: The run's options; those of data, model, cache and search count.
        has_max_length: Whether the user has given the length, in place of the data's own.
        limit: Largest size worth trying; None for as many rows as the data has.
        is_fresh: Search even if an earlier search found the answer.
    """

    config: Config
    has_max_length: bool
    limit: int | None
    is_fresh: bool

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What trains: the mode that the options name, or else all of it and the head alone."""
        mode = mode_of(self.config.model)
        return DEFAULT_MODES if mode == "full" else (mode,)


def find_batches(task: Task, *, emit: Emit) -> dict[str, Any]:
    """Search on every device that the options allow, in each mode.

    Returns:
        ``schema_version`` and ``results``, one a device and mode.

    Raises:
        ConfigurationInvalid: If the limit of memory is no size.
        BatchDoesNotFit: If nowhere even one row fits.
        ProbeFailed: If a probe failed for another reason than memory.
    """
    config = task.config
    longest_tokens, rows = _measure_data(task, emit=emit)
    bounds = _bounds(config, limit=task.limit or rows, first=None)
    memory = None if task.is_fresh else cache_folder(config.cache, "batches")
    results = []
    for device in _devices(config, emit=emit):
        for mode in task.modes:
            case = _case(config, device=device, mode=mode, longest_tokens=longest_tokens)
            parts = _parts(config, mode)
            results.append(
                _search_parts(case, parts, device=device, bounds=bounds, memory=memory, emit=emit)
            )
    if not any(result["max_verified"] for result in results):
        raise BatchDoesNotFit(
            "not even a batch of one row fits in memory",
            remedy="lower --max-length, use --freeze-core, or raise --memory-limit",
        )
    return {"schema_version": SCHEMA_VERSION, "results": results}


def estimate_batches(
    task: Task, *, machine: str | None, memory: str | None, emit: Emit
) -> dict[str, Any]:
    """Foretell the batch sizes of a Mac, without it.

    Args:
        task: What batch sizes are looked for.
        machine: A chip and its memory, such as ``m1-8gb``.
        memory: Size of a Mac's memory, in place of a machine.
        emit: Receives progress events.

    Returns:
        ``schema_version`` and ``estimates``, one a length and mode.

    Raises:
        ConfigurationInvalid: If the memory is no size, or less than any Mac has.
        UsageError: If no such machine is known.
    """
    config = task.config
    mac = _mac_with(memory or "") if machine is None else find_mac(machine)
    longest_tokens, rows = _measure_data(task, emit=emit)
    lengths = [longest_tokens] if task.has_max_length else [longest_tokens, ARTICLE_TOKENS]
    device = MpsDevice()
    estimates = []
    for tokens in lengths:
        for mode in task.modes:
            case = _case(config, device=device, mode=mode, longest_tokens=tokens)
            for parts in dict.fromkeys([_parts(config, mode), _WHOLE]):
                emit(Stage(f"estimating {mode} at {case.padded_length} tokens on {mac.name}"))
                by_part = {
                    part: estimate(
                        dataclasses.replace(case, part=part),
                        memory_bytes=mac.budget_bytes,
                        limit=task.limit or rows,
                    )
                    for part in parts
                }
                estimates.append(_describe_estimate(case, by_part, mac))
        _warn_of_wrong_results(device, estimates, padded_length=case.padded_length, emit=emit)
    return {"schema_version": SCHEMA_VERSION, "estimates": estimates}


def _warn_of_wrong_results(
    device: Device, estimates: list[dict[str, Any]], *, padded_length: int, emit: Emit
) -> None:
    """Say how many rows of a width a run takes where memory would allow more."""
    rows = device.shapes.max_examples(padded_length=padded_length)
    if rows is None:
        return
    # Where the core runs once, only its pass is sure to see all tokens.
    sizes = [
        one["prefix_batch"] or one["batch"]
        for one in estimates
        if one["max_length"] == padded_length
    ]
    if max(sizes) > rows:
        emit(
            events.WarningMessage(
                f"more than {rows:,} rows of {padded_length} tokens fit",
                remedy=f"a run takes no more: with this PyTorch {device.name} computes wrongly on "
                f"more than {device.shapes.max_tokens:,} tokens at once",
            )
        )


def _mac_with(memory: str) -> Mac:
    memory_bytes = parse_size(memory, origin="--memory")
    if memory_bytes < SMALLEST_MEMORY_BYTES:
        raise ConfigurationInvalid(
            f"--memory is {memory!r}, which is less than any Mac has",
            remedy="write for example 16GiB",
        )
    return Mac(f"Mac with {memory}", memory_bytes)


def keep_results(found: dict[str, Any], folder: Path) -> None:
    """Write the results as JSON and as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "find-batch.json", found)
    draw_batches(found["results"], to=folder / "find-batch.svg")


def with_found_sizes(prepared: Prepared, plan: TrainingPlan, *, emit: Emit) -> Prepared:
    """Return a run with the batch sizes that were found for it, in place of ``auto``.

    No size above the rows of an update is tried, so that mostly one probe is enough.

    Raises:
        BatchDoesNotFit: If not even one row fits.
        ProbeFailed: If a probe failed for another reason than memory.
    """
    config, classifier = prepared.config, prepared.classifier
    case = Case(
        device=prepared.device.name,
        architecture=architecture_of(classifier.model.config.to_dict()),
        classes=len(classifier.class_names),
        mode=prepared.mode,
        padded_length=plan.padded_lengths[-1],
        precision=config.training.precision,
    )
    emit(Stage("looking for the batch size"))
    found = {}
    divides = caches_features(config, case.mode) and make_feature_extractor(classifier) is not None
    for part in _DIVIDED if divides else _WHOLE:
        most = config.training.eval_batch_size if part == "prefix" else plan.effective_batch_size
        answer = _search(
            dataclasses.replace(case, part=part),
            device=prepared.device,
            bounds=_bounds(config, limit=most, first=most),
            memory=cache_folder(config.cache, "batches"),
            probes=[],
            emit=emit,
        )
        found[part] = answer.found.recommended
    batch_size = found.get("suffix", found.get("whole", 1))
    # A forward alone keeps no graph, which is most of what an update of the whole model takes, and
    # little of one that runs through a frozen core.
    larger = 2 * batch_size if case.mode == "full" else batch_size
    eval_batch_size = found.get("prefix", max(config.training.eval_batch_size, larger))
    emit(Stage(f"batch size: {batch_size}, and {eval_batch_size} without gradients"))
    training = dataclasses.replace(
        config.training, batch_size=batch_size, eval_batch_size=eval_batch_size
    )
    return dataclasses.replace(prepared, config=dataclasses.replace(config, training=training))


def _devices(config: Config, *, emit: Emit) -> list[Device]:
    if config.training.device == "auto":
        return list(usable_devices(emit=emit))
    return [select_device(config.training.device, emit=emit)]


def _parts(config: Config, mode: Mode) -> tuple[Part, ...]:
    """Return what is searched for: a frozen core that runs once has a batch size of its own."""
    return _DIVIDED if caches_features(config, mode) else _WHOLE


def _case(config: Config, *, device: Device, mode: Mode, longest_tokens: int) -> Case:
    shape = load_shape(config.model.model, revision=config.model.revision)
    padded_length = device.shapes.padded_lengths(longest_tokens)[-1]
    return Case(
        device=device.name,
        architecture=architecture_of(shape.to_dict()),
        # Their number changes next to nothing.
        classes=6,
        mode=mode,
        padded_length=min(padded_length, most_positions(shape) or padded_length),
        precision=config.training.precision,
    )


def _measure_data(task: Task, *, emit: Emit) -> tuple[int, int]:
    """Return the tokens of the longest text and the rows to train on."""
    options, model = task.config.data, task.config.model
    if options.data == TREC and options.data_dir is None:
        # As published, so that neither the data nor a tokenizer is needed.
        longest_tokens = LONGEST_TOKENS
        rows = min(TRAINING_ROWS, options.max_train_samples or TRAINING_ROWS)
    elif task.has_max_length and task.limit:
        return model.max_length, task.limit
    else:
        table = load_splits(task.config, emit=emit)
        rows = len(table["train"])
        longest_tokens = model.max_length
        if not task.has_max_length:
            tokenizer = load_tokenizer(model.model, revision=model.revision)
            texts = [text for split in table.values() for text in split["text"]]
            encoded = encode_texts(tokenizer, texts, max_length=model.max_length)
            longest_tokens = int(encoded.lengths.max())
    if task.has_max_length:
        return model.max_length, rows
    emit(Stage(f"the longest text of {options.data} has {longest_tokens} tokens"))
    return longest_tokens, rows


def _search_parts(
    case: Case,
    parts: Sequence[Part],
    *,
    device: Device,
    bounds: Bounds,
    memory: Path | None,
    emit: Emit,
) -> dict[str, Any]:
    """Search for each part's batch size; return the result that the command shows."""
    started = time.perf_counter()
    probes: list[tuple[Part, Outcome]] = []
    answers: dict[Part, Answer] = {}
    for part in parts:
        what = f"{case.mode}{_part_in_words(part)}, {case.padded_length} tokens"
        emit(Stage(f"searching on {device.name}: {what}"))
        try:
            answers[part] = _search(
                dataclasses.replace(case, part=part),
                device=device, bounds=bounds, memory=memory, probes=probes, emit=emit,
            )  # fmt: skip
        except BatchDoesNotFit as error:
            emit(events.WarningMessage(error.message, remedy=error.remedy))
        except ModelUnsupported as error:
            emit(events.WarningMessage(f"{error.message} and runs at every update"))
            return _search_parts(
                case, _WHOLE, device=device, bounds=bounds, memory=memory, emit=emit
            )
    return _describe(case, parts, answers, probes, seconds=time.perf_counter() - started)


def _search(
    case: Case,
    *,
    device: Device,
    bounds: Bounds,
    memory: Path | None,
    probes: list[tuple[Part, Outcome]],
    emit: Emit,
) -> Answer:
    def note(outcome: Outcome) -> None:
        probes.append((case.part, outcome))
        emit(
            events.Probe(
                batch_size=outcome.batch_size,
                verdict=outcome.verdict,
                peak_bytes=outcome.peak_bytes,
                examples_per_second=outcome.examples_per_second,
                seconds=outcome.seconds,
                reason=outcome.reason,
            )
        )

    bounds = _within(device.shapes.max_examples(padded_length=case.padded_length), bounds)
    return find_batch(case, device=device, bounds=bounds, memory=memory, on_probe=note)


def _bounds(config: Config, *, limit: int, first: int | None) -> Bounds:
    options = config.search
    return Bounds(
        limit=limit,
        first=first,
        memory_limit_bytes=None
        if options.memory_limit is None
        else parse_size(options.memory_limit, origin="--memory-limit"),
        time_limit_seconds=options.time_limit,
    )


def _within(rows: int | None, bounds: Bounds) -> Bounds:
    """Return bounds of no more than some rows, None for any."""
    if rows is None:
        return bounds
    limit = min(bounds.limit, rows)
    first = None if bounds.first is None else min(bounds.first, limit)
    return dataclasses.replace(bounds, limit=limit, first=first)


def _describe(
    case: Case,
    parts: Sequence[Part],
    answers: dict[Part, Answer],
    probes: Sequence[tuple[Part, Outcome]],
    *,
    seconds: float,
) -> dict[str, Any]:
    fits = len(answers) == len(parts)
    answer = answers[parts[-1]] if fits else None
    found = answer.found if answer else None
    peaks = [one.peak_bytes for one in answers.values() if one.peak_bytes]
    return {
        "device": case.device,
        "mode": case.mode,
        "max_length": case.padded_length,
        "precision": case.precision,
        "stores_features": len(parts) > 1,
        "budget_bytes": next((one.budget_bytes for one in answers.values()), None),
        "max_verified": found.max_verified if found else 0,
        "first_failed": found.first_failed if found else 1,
        "predicted_maximum": found.predicted_maximum if found else None,
        "recommended": found.recommended if found else 0,
        "fastest": found.fastest if found else 0,
        "prefix_batch": answers["prefix"].found.recommended if "prefix" in answers else None,
        "peak_bytes": max(peaks) if fits and peaks else None,
        "probes": [_describe_probe(part, outcome) for part, outcome in probes],
        "seconds": seconds,
    }


def _describe_probe(part: Part, outcome: Outcome) -> dict[str, Any]:
    return {
        "part": part,
        "batch": outcome.batch_size,
        "outcome": outcome.verdict,
        "peak_bytes": outcome.peak_bytes,
        "examples_per_second": outcome.examples_per_second,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
    }


def _part_in_words(part: Part) -> str:
    return {"whole": "", "prefix": ", the frozen part", "suffix": ", what is trained"}[part]


def _describe_estimate(case: Case, by_part: dict[Part, Estimate], mac: Mac) -> dict[str, Any]:
    trained = list(by_part.values())[-1]
    return {
        "machine": mac.name,
        "device": case.device,
        "mode": case.mode,
        "max_length": case.padded_length,
        "precision": case.precision,
        "stores_features": len(by_part) > 1,
        "budget_bytes": mac.budget_bytes,
        "batch": trained.batch,
        "lowest_batch": trained.lowest_batch,
        "highest_batch": trained.highest_batch,
        "prefix_batch": by_part["prefix"].batch if "prefix" in by_part else None,
        "peak_bytes": max(one.peak_bytes for one in by_part.values()),
        "basis": trained.basis,
    }
