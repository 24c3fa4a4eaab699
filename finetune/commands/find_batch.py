"""``finetune find-batch``: finds the largest batch size that fits and the fastest one.

Searches on every device, in a child process. For another Mac, it estimates the sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.config.modes import MODES, Mode
from finetune.config.schema import DEFAULT_LORA, Config, PositiveInt
from finetune.devices.mps.facts import Mac, find_mac
from finetune.errors import BatchDoesNotFitError
from finetune.events import Info, emit
from finetune.ownership import OwnFolder
from finetune.runs.guess import GuessedConfig, guess_options

if TYPE_CHECKING:
    from finetune.batch_finder.results import FoundBatches, Result
    from finetune.devices.base import Device

EXAMPLES = """\b
Examples:
  finetune find-batch                  BERT-base, on every device
  finetune find-batch --model minilm --freeze-core
  finetune find-batch reviews.csv
  finetune find-batch --for m1-8gb     estimate for another machine
"""


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
    """Find the largest batch size that fits and the fastest one, like ``finetune find-batch``.

    Args:
        file: A table, a dataset or preset name, a YAML file, or a run.
        config: A YAML file or a preset name.
        machine: A Mac such as ``m1-8gb``: estimate its batch sizes instead of searching here.
        limit: Largest batch size to try. Default: the number of training rows.
        fresh: Ignore the stored results of earlier searches.
        output_dir: Folder for find-batch.json: new, empty, or from an earlier search.
        assignments: More options, as ``section.option=value``.
        options: The flags of ``finetune run`` for data, model, device, precision, cache and search.
            If they select no mode, the search covers full, head and, if peft is installed, LoRA
            with rank 8.
    """
    loaded = flags.load(file=file, config=config, assignments=assignments, **options)
    loaded = guess_options(loaded)
    mac = None if machine is None else find_mac(machine)
    from finetune.batch_finder.results import FoundBatches

    folder = None if output_dir is None else OwnFolder(Path(output_dir).expanduser(), "find-batch")
    if folder:
        folder.check()
    batches = FoundBatches(())
    for result in _find(loaded, mac, limit=limit, is_fresh=fresh):
        batches = FoundBatches((*batches.results, result))
        if folder and any(each.largest for each in batches.results):
            folder.write_all({"find-batch.json": batches.to_json()})
    if not mac and not any(result.largest for result in batches.results):
        raise BatchDoesNotFitError(
            "not even a single example fits in memory",
            remedy="follow the warnings, or lower --max-length, choose a smaller --model, or raise "
            "--memory",
        )
    return batches


def _find(
    loaded: GuessedConfig, mac: Mac | None, *, limit: int | None, is_fresh: bool
) -> "Iterator[Result]":
    """Search on each device in each mode, or estimate for a Mac, and yield each result at once."""
    from finetune.batch_finder.estimate import estimate
    from finetune.batch_finder.results import Case, architecture_of
    from finetune.batch_finder.search import find, find_parts, memory_limit_bytes
    from finetune.batch_finder.trials import TrialServer
    from finetune.model.load import load_shape, max_positions
    from finetune.model.mean_pooling import pool_shape_by_mean
    from finetune.model.tensor_store import cache_folder
    from finetune.runs.features import stores_features

    config, model, training = loaded.config, loaded.config.model, loaded.config.training
    tokens, rows, task, outputs = _measure_data(loaded)
    shape = load_shape(model.model, revision=model.revision)
    has_mean_layer = model.pooling == "mean" and pool_shape_by_mean(shape)  # adds a layer
    if mac:
        mac = replace(mac, limit_bytes=memory_limit_bytes(config.search))
    with TrialServer() as server:
        for device, precision in _devices(config, mac, hidden_size=shape.hidden_size):
            longest = device.shapes.padded_length(tokens)
            find_part: Callable[[Case], Result] = partial(
                find,
                device=device,
                options=config.search,
                server=server,
                limit=limit or rows,
                cache=cache_folder(config.cache, "batches"),
                is_fresh=is_fresh,
            )
            if mac:
                find_part = partial(estimate, mac=mac, limit=limit or rows)
            action = f"estimating on {mac.name}" if mac else f"searching on {device.name}"
            for mode in _modes(model.mode):
                case = Case(
                    device.name,
                    architecture_of(shape.to_dict()),
                    classes=outputs,
                    mode=mode,
                    padded_length=min(longest, max_positions(shape) or longest),
                    precision=precision,
                    gradient_checkpointing=bool(training.gradient_checkpointing)
                    and mode.trains_encoder,
                    task=task,
                    has_mean_layer=has_mean_layer,
                    lora=(model.lora or DEFAULT_LORA) if mode.is_lora else None,
                )
                is_stored = stores_features(config.cache, mode)
                yield find_parts(case, find_part, stores_features=is_stored, action=action)


def _devices(
    config: Config, mac: Mac | None, *, hidden_size: int
) -> "Iterator[tuple[Device, str]]":
    """Yield the chosen device, or all usable devices, each with the precision of a run."""
    from finetune.devices.mps.device import MpsDevice
    from finetune.devices.select import select_device, usable_devices
    from finetune.model.tensor_store import cache_folder
    from finetune.training.precision import choose_precision

    training, cache = config.training, cache_folder(config.cache, "precision")
    if mac:
        yield MpsDevice(chip=mac.chip), training.precision_without_timing
        return
    is_auto = training.device == "auto"
    for device in usable_devices() if is_auto else [select_device(training.device)]:
        if training.precision == "auto":
            choice = choose_precision(device, hidden_size=hidden_size, cache=cache)
            yield device, choice.value
        else:
            yield device, training.precision


def _measure_data(guessed: GuessedConfig) -> tuple[int, int, str, int]:
    """Return the longest text in tokens, the training rows, the task name and its output count.

    TREC is not read: its longest text is assumed to have ``--max-length`` tokens.
    """
    from finetune.data.dataset import texts_of
    from finetune.data.load import load_splits
    from finetune.data.trec import TRAINING_ROWS
    from finetune.model.source import find_model
    from finetune.tokenization.encode import encode_texts

    data, model = guessed.config.data, guessed.config.model
    if data.data == "trec" and data.data_dir is None:
        return model.max_length, TRAINING_ROWS, "single", 6
    loaded, tokens = load_splits(data, read=guessed.read), model.max_length
    rows = len(loaded.splits["train"])
    emit(Info(f"trying batch sizes up to {rows:,}; see --limit"))
    if "max_length" not in guessed.sources:
        source = find_model(model.model, revision=model.revision, with_weights=False)
        tokenizer = source.read_tokenizer()
        encoded = (
            encode_texts(tokenizer, *texts_of(split), max_length=model.max_length)
            for split in loaded.splits.values()
        )
        tokens = max(int(split.lengths.max()) for split in encoded)
        emit(Info(f"the longest text of {data.data} has {tokens} tokens"))
    return tokens, rows, loaded.task.name, len(loaded.task.output_names)


def _modes(mode: Mode) -> list[Mode]:
    """Return the mode that the configuration selects, or the modes to search by default."""
    from finetune.model.lora import is_installed

    if mode.kind.options:
        return [mode]
    searched = [Mode(name) for name, kind in MODES.items() if kind.is_searched]
    return [each for each in searched if is_installed() or not each.is_lora]


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
    """Find the largest batch size that fits and the fastest one.

    FILE is a table, a configuration or a run folder, as for finetune run.

    The search runs real training steps in a child process that is limited to the free memory.
    Without --freeze-core, --head, --train-layers or --lora-rank, it searches three modes: all
    layers, LoRA with rank 8 (if peft is installed), and only the head.
    """
    folder = options["output_dir"]
    display.run(find_batch, lambda batches: show_batches(batches, folder=folder), **options)


def show_batches(batches: "FoundBatches", *, folder: str | None) -> None:
    """Print one line per device or machine, length and mode, then the notes."""
    rows = [_cells(result) for result in batches.results]
    titles = list(rows[0])
    show_table(titles, [list(row.values()) for row in rows], numbers=titles[3:])
    notes = [*dict.fromkeys(result.basis for result in batches.results if result.basis)]
    for result in batches.results:
        case = f"{result.mode} at {result.padded_length} tokens"
        if size := result.features_batch_size:
            notes.append(f"{case}: use --eval-batch-size {size:,} to extract features")
        if maximum := result.predicted_largest:
            ended = "the search hit its time limit; predicted maximum:"
            notes.append(f"{case}: {ended} {maximum:,} examples")
        if result.highest and result.recommended < result.highest:
            bounds = f"{result.recommended:,} to {result.highest:,} examples fit"
            notes.append(f"{_mode(result)}: {bounds}")
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
        "too big": result.first_failed,
        "GiB": result.peak_bytes and f"{result.peak_bytes / 2**30:.2f}",
        "budget": result.budget_bytes and f"{result.budget_bytes / 2**30:.2f}",
        "fastest": result.fastest,
        "use": result.recommended,
        "trials": None if is_estimate else len(result.trials),
        "seconds": None if is_estimate else round(result.seconds),
    }
    return {
        name: "-" if value is None else f"{value:,}" if isinstance(value, int) else value
        for name, value in values.items()
    }


def _mode(result: "Result") -> str:
    is_unsplit = Mode(result.mode).trained_layers is not None and not result.stores_features
    return f"{result.mode}, no stored features" if is_unsplit else result.mode
