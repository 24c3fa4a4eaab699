"""``finetune find-batch``: finds the largest batch size that fits, and the fastest.

It searches every device, in a child process. For a Mac that is not here, it estimates sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.config.mode import Mode
from finetune.config.schema import DEFAULT_LORA, Config, PositiveInt, change_options
from finetune.devices.mps.chips import Mac, find_mac
from finetune.errors import (
    BatchDoesNotFitError,
    DataNotFoundError,
    HubNotReachableError,
    ModelNotFoundError,
    ModelUnsupportedError,
)
from finetune.events import Info, WarningMessage, emit
from finetune.ownership import OwnFolder
from finetune.runs.guess import guess_options

if TYPE_CHECKING:
    from finetune.batch_finder.results import Case, FoundBatches, Result
    from finetune.devices.base import Device

EXAMPLES = """\b
Examples:
  finetune find-batch                  BERT-base, on every device
  finetune find-batch --model minilm --freeze-core
  finetune find-batch reviews.csv
  finetune find-batch --for m1-8gb     a Mac that is not here
"""


@dataclass(frozen=True)
class _Texts:
    """Facts about the data that a search needs; by default, the six classes of TREC."""

    max_tokens: int
    rows: int
    task: str = "single"
    outputs: int = 6


def find_batch(
    file: str | Path | None = None,
    *,
    config: str | Path | None = None,
    machine: str | None = None,
    limit: PositiveInt | None = None,
    fresh: bool = False,
    output_dir: str | Path | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> "FoundBatches":
    """Find the largest batch size that fits, and the fastest, as ``finetune find-batch`` does.

    Args:
        file: A table, the name of a dataset or preset, a YAML file, or a run.
        config: A YAML file or the name of a preset.
        machine: A Mac such as ``m1-8gb``: estimate its batch sizes instead of searching here.
        limit: Largest batch size to try. Default: the number of training rows.
        fresh: Search again, even if an earlier search found the batch sizes.
        output_dir: Folder for find-batch.json: new, empty or an earlier search.
        assignments: More options, as ``section.option=value``.
        options: The flags of ``finetune run`` for data, model, device, precision, cache and search.
            If they set no mode, the modes full, head and, if peft is installed, LoRA of rank 8 are
            searched.
    """
    loaded = flags.load(file=file, config=config, assignments=assignments, **options)
    loaded = guess_options(loaded)
    has_max_length = "max_length" in loaded.sources
    mac = None if machine is None else find_mac(machine)
    from finetune.batch_finder.results import FoundBatches

    folder = None if output_dir is None else OwnFolder(Path(output_dir).expanduser(), "find-batch")
    if folder:
        folder.check()
    texts = _measure_texts(loaded.config, has_max_length, limit)
    if mac:
        iterator = estimate_modes(loaded.config, mac, texts)
    else:
        iterator = search_modes(loaded.config, texts, is_fresh=fresh)
    results: list[Result] = []
    for result in iterator:
        results.append(result)
        if folder:
            folder.write_all({"find-batch.json": FoundBatches(tuple(results)).to_json()})
    return FoundBatches(tuple(results))


def search_modes(config: Config, texts: _Texts, *, is_fresh: bool) -> "Iterator[Result]":
    """Search on each device in each mode, and yield each result as soon as it is known."""
    from finetune.batch_finder.find import Search, explain, find_parts, memory_limit_bytes
    from finetune.devices.select import select_device, usable_devices
    from finetune.model.tensor_store import cache_folder
    from finetune.runs.features import stores_features

    cache, name = cache_folder(config.cache, "batches"), config.training.device
    devices = [*usable_devices()] if name == "auto" else [select_device(name)]
    cases = [
        (device, case)
        for device in devices
        for case in _cases(_with_precision(config, device), device, texts)
    ]
    unfit: list[Result] | None = []
    for device, case in cases:
        search = Search(device, config.search, texts.rows, None, cache, is_fresh)
        is_stored = stores_features(config.cache, case.mode)
        result = find_parts(case, search, stores_features=is_stored)
        # The first results are held back until one fits, since otherwise the search is an error.
        if unfit is not None and not result.largest:
            unfit.append(result)
            continue
        yield from (*(unfit or ()), result)
        unfit = None
    if unfit:
        error = BatchDoesNotFitError(
            "not even a batch of one example fits in memory",
            remedy="lower --max-length, choose a smaller --model, or raise --memory",
        )
        raise explain(error, devices[-1], memory_limit_bytes(config.search))


def _with_precision(config: Config, device: "Device") -> Config:
    """Return the options with the precision that a run would use on a device."""
    from finetune.model.shape import load_shape
    from finetune.model.tensor_store import cache_folder
    from finetune.training.precision import choose_precision

    if config.training.precision != "auto":
        return config
    model, cache = config.model, cache_folder(config.cache, "precision")
    hidden_size = load_shape(model.model, revision=model.revision).hidden_size
    choice = choose_precision(device, hidden_size=hidden_size, cache=cache)
    return change_options(config, {"precision": choice.value})


def estimate_modes(config: Config, mac: Mac, texts: _Texts) -> "Iterator[Result]":
    """Estimate the batch sizes of a Mac for the same cases as in a search."""
    from finetune.batch_finder.estimate import estimate_parts
    from finetune.batch_finder.find import memory_limit_bytes
    from finetune.devices.mps.device import MpsDevice
    from finetune.runs.features import stores_features

    mac = replace(mac, limit_bytes=memory_limit_bytes(config.search))
    device = MpsDevice(chip=mac.chip)
    for case in _cases(config, device, texts):
        is_stored = stores_features(config.cache, case.mode)
        emit(Info(f"estimating {case.mode} at {case.padded_length} tokens on {mac.name}"))
        try:
            yield estimate_parts(case, mac, stores_features=is_stored, limit=texts.rows)
        except ModelUnsupportedError as error:
            if not is_stored:
                raise
            emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
            yield estimate_parts(case, mac, stores_features=False, limit=texts.rows)


def _cases(config: Config, device: "Device", texts: _Texts) -> "list[Case]":
    """Return one search case per mode, at the length of the longest text that the model reads.

    If the options set no mode, the modes are full, head and, if peft is installed, LoRA.
    """
    from finetune.batch_finder.results import Case, architecture_of
    from finetune.model.lora import is_installed
    from finetune.model.mean_pooling import pool_shape_by_mean
    from finetune.model.shape import load_shape, max_positions

    training, modes = config.training, [config.model.mode]
    if modes == ["full"]:
        modes += [*([Mode("lora")] if is_installed() else []), Mode("head")]
    shape = load_shape(config.model.model, revision=config.model.revision)
    has_mean_layer = config.model.pooling == "mean" and pool_shape_by_mean(shape)
    longest = device.shapes.padded_length(texts.max_tokens)
    return [
        Case(
            device.name, architecture_of(shape.to_dict()), classes=texts.outputs, mode=mode,
            padded_length=min(longest, max_positions(shape) or longest),
            precision=training.precision_without_timing,
            gradient_checkpointing=bool(training.gradient_checkpointing) and mode.trains_encoder,
            task=texts.task, has_mean_layer=has_mean_layer,
            lora=(config.model.lora or DEFAULT_LORA) if mode.is_lora else None,
        )
        for mode in modes
    ]  # fmt: skip


def _measure_texts(config: Config, has_max_length: bool, limit: int | None) -> _Texts:
    """Read as much of the data as is needed: nothing of TREC if --max-length is set."""
    from finetune.data.dataset import texts_of
    from finetune.data.load import load_splits
    from finetune.data.trec import TRAINING_ROWS
    from finetune.model.source import find_model
    from finetune.tokenization.encode import encode_texts

    options, model = config.data, config.model
    is_trec = options.data == "trec" and options.data_dir is None
    longest_of_trec = _Texts(model.max_length, limit or TRAINING_ROWS)
    if is_trec and has_max_length:
        return longest_of_trec
    try:
        loaded = load_splits(options)
        task, rows = loaded.task, limit or len(loaded.splits["train"])
        texts = _Texts(model.max_length, rows, task.name, len(task.output_names))
        if has_max_length:
            return texts
        source = find_model(model.model, revision=model.revision, with_weights=False)
        tokenizer = source.read_tokenizer()
    except (
        DataNotFoundError,
        HubNotReachableError,
        ModelNotFoundError,
        ModelUnsupportedError,
    ) as error:
        if not is_trec:
            raise
        message = f"the lengths of the TREC texts are unknown: {error.message}"
        remedy = f"batch sizes are for texts of {model.max_length} tokens; see --max-length"
        emit(WarningMessage(message, remedy=remedy))
        return longest_of_trec
    max_tokens = max(
        int(encode_texts(tokenizer, *texts_of(split), max_length=model.max_length).lengths.max())
        for split in loaded.splits.values()
    )
    emit(Info(f"the longest text of {options.data} has {max_tokens} tokens"))
    emit(Info(f"batch sizes of up to {rows:,} are tried; see --limit"))
    return replace(texts, max_tokens=max_tokens)


@click.command(cls=flags.GroupedCommand, epilog=EXAMPLES)
@flags.source_options
@flags.chosen_options(
    *("device", "precision", "gradient_checkpointing"),
    sections=("data", "model", "search", "cache"),
)
@click.option("--for", "machine", metavar="MACHINE", help="Estimate for a Mac, such as m1-8gb.")
@flags.options_of(find_batch, "config", "machine", "assignments")
@flags.with_display
def command(*, display: flags.Display, **options: Any) -> None:
    """Find the largest batch size that fits, and the fastest.

    FILE is what finetune run accepts: a table, a configuration or a run.

    The search takes real training steps, in a child process that can't use more memory than is
    free. Without --freeze-core, --head, --train-layers or --lora-rank, it searches three modes: all
    layers, LoRA of rank 8 (if peft is installed), and only the head.
    """
    folder = options["output_dir"]
    display.run(
        find_batch, lambda found: show_batches(found, folder=folder), **flags.given(options)
    )


def show_batches(found: "FoundBatches", *, folder: str | None) -> None:
    """Print one line per device or machine, length and mode, and then notes."""
    rows = [_cells(result) for result in found.results]
    titles = list(rows[0])
    show_table(titles, [list(row.values()) for row in rows], numbers=titles[3:])
    notes = []
    for result in found.results:
        place = f"{result.mode} at {result.padded_length} tokens"
        if size := result.features_batch_size:
            notes.append(f"{place}: use --eval-batch-size {size:,} to extract features")
        if maximum := result.predicted_largest:
            ended = "the time limit ended the search; memory is predicted to hold"
            notes.append(f"{place}: {ended} {maximum:,} examples")
        if result.highest and result.recommended < result.highest:
            bounds = f"{result.recommended:,} to {result.highest:,} examples fit"
            notes.append(f"{_mode(result)}: {bounds}")
    if bases := dict.fromkeys(result.basis for result in found.results if result.basis):
        show_lines(*bases)
    if folder:
        notes.append(f"results: {folder}")
    if notes:
        show_lines(*notes)


def _cells(result: "Result") -> dict[str, str]:
    is_estimate = result.machine is not None
    values: dict[str, Any] = {
        "device": result.machine or result.device,
        "mode": _mode(result),
        "precision": result.precision,
        "tokens": result.padded_length,
        "largest": result.largest,
        "fails": result.first_failed,
        "GiB": _gibibytes(result.peak_bytes),
        "of": _gibibytes(result.budget_bytes),
        "fastest": result.fastest,
        "use": result.recommended,
        "trials": None if is_estimate else len(result.trials),
        "s": None if is_estimate else round(result.seconds),
    }
    texts = {
        name: f"{value:,}" if isinstance(value, int) else value for name, value in values.items()
    }
    return {name: text or "-" for name, text in texts.items()}


def _gibibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def _mode(result: "Result") -> str:
    is_unsplit = Mode(result.mode).trained_layers is not None and not result.stores_features
    return f"{result.mode}, no stored features" if is_unsplit else result.mode
