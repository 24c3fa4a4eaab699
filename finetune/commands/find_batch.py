"""``finetune find-batch``: the largest batch size that fits, and the fastest.

Every device is searched, in a child process. For a Mac that is not here, sizes are estimated.
"""

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import show_lines, show_table
from finetune.commands.options import (
    Display,
    GroupedCommand,
    chosen_options,
    complete_folder,
    completes,
    config_option,
    given,
    load,
    with_display,
)
from finetune.config.mode import Mode
from finetune.config.schema import OPTIONS, Config
from finetune.devices.mps.chips import MACS, Mac, find_mac
from finetune.errors import (
    BatchDoesNotFit,
    ConfigurationInvalid,
    DataNotFound,
    HubNotReachable,
    ModelNotFound,
    ModelUnsupported,
    UsageError,
)
from finetune.events import Emit, Info, WarningMessage, ignore
from finetune.files import write_json, write_text_atomically

if TYPE_CHECKING:
    from finetune.batch_finder.case import Case
    from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches
    from finetune.devices.base import Device

# The article padded every text to this length.
ARTICLE_TOKENS = 512
MIN_MEMORY_BYTES = 2**30
EXAMPLES = """\b
Examples:
  finetune find-batch                  BERT-base and its head, on every device
  finetune find-batch --model minilm --memory-limit 2GiB --device cpu
  finetune find-batch --data reviews.csv --train-layers 2
  finetune find-batch --for m1-8gb     a Mac that is not here
"""
SECTIONS = ("data", "model", "search", "cache")
SEARCH_OPTIONS = [one.name for one in OPTIONS.values() if one.section in SECTIONS]


@dataclass(frozen=True)
class _Texts:
    """What a search needs to know of the data; by default a single label of TREC's six classes."""

    max_tokens: int
    rows: int
    task: str = "single"
    outputs: int = 6


def find_batch(
    config: str | Path | None = None,
    *,
    machine: str | None = None,
    memory: str | None = None,
    limit: int | None = None,
    fresh: bool = False,
    emit: Emit = ignore,
    **options: Any,
) -> "FoundBatches":
    """Find the largest batch size that fits, and the fastest, as ``finetune find-batch`` does.

    Args:
        config: A YAML file or the name of a recipe.
        machine: A Mac such as ``m1-8gb``, to estimate its batch sizes instead of searching here.
        memory: The memory of such a Mac, such as ``16GiB``, in place of its name.
        limit: Largest batch size worth trying; None for the rows of the data.
        fresh: Search even if an earlier search has found the batch sizes.
        options: Those of ``finetune run`` for data, model, device, precision, cache and search.
            If none names a mode, ``full`` and ``head`` are searched. ``output_dir`` is for the
            results of a search as JSON and as a picture.
    """
    if machine is not None and memory is not None:
        raise UsageError("--for and --memory both name a machine", remedy="give one of them")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}", remedy="give at least 1")
    output_dir = options.pop("output_dir", None)
    folder = None if output_dir is None else Path(output_dir).expanduser()
    loaded = load(options, config=config)
    search = _Search(loaded.config, "max_length" in loaded.sources, limit, emit)
    if machine is not None:
        return search.estimate(find_mac(machine))
    if memory is not None:
        return search.estimate(_mac_with(memory))
    return search.run(is_fresh=fresh, output_dir=folder)


@dataclass(frozen=True)
class _Search:
    """A search for batch sizes; with ``has_max_length`` the user has given the texts' length."""

    config: Config
    has_max_length: bool
    limit: int | None
    emit: Emit

    @property
    def modes(self) -> list[Mode]:
        mode = self.config.model.mode
        return [mode, Mode("head")] if mode == "full" else [mode]

    def run(self, *, is_fresh: bool, output_dir: Path | None) -> "FoundBatches":
        """Search on each device, in each mode; of several processes, each tries its own device."""
        from finetune.batch_finder.find import Search, find_parts, memory_limit_bytes
        from finetune.batch_finder.results import FoundBatches, least_of
        from finetune.devices.select import select_device, usable_devices
        from finetune.distributed.processes import join_processes
        from finetune.report.batches import draw_batches
        from finetune.report.chart import picture_of
        from finetune.runs.cache import cache_folder
        from finetune.runs.features import stores_features
        from finetune.runs.folder import check_writable

        config, processes = self.config, join_processes()
        emit = self.emit if processes.is_main else ignore
        if output_dir is not None:
            processes.broadcast(lambda: check_writable(output_dir))
        memory_limit_bytes(config.search)  # refused, if invalid, before anything is loaded
        texts = replace(self, emit=emit).measure_texts()
        cache = None if is_fresh else cache_folder(config.cache, "batches")
        choice, results = config.training.device, []
        is_any = choice == "auto"
        devices = usable_devices(emit=emit) if is_any else [select_device(choice, emit=emit)]
        for device, mode in product(devices, self.modes):
            search = Search(device, config.search, texts.rows, None, cache, emit)
            case, is_stored = self.case(device, mode, texts), stores_features(config.cache, mode)
            own = find_parts(case, search, stores_features=is_stored)
            results.append(least_of(processes.on(device).gather(own)))
        if not any(result.max_verified for result in results):
            raise BatchDoesNotFit(
                "not even a batch of one example fits in memory",
                remedy="lower --max-length, choose a smaller --model, or raise --memory-limit",
            )
        found = FoundBatches(results=tuple(results))
        if output_dir is not None and processes.is_main:
            output_dir.mkdir(parents=True, exist_ok=True)
            write_json(output_dir / "find-batch.json", found.to_json())
            if charts := draw_batches(found.results):
                write_text_atomically(output_dir / "find-batch.svg", picture_of(charts))
        return found

    def estimate(self, mac: Mac) -> "FoundBatches":
        """Estimate the batch sizes of a Mac, at the data's length and at the article's."""
        from finetune.batch_finder.estimate import estimate_parts
        from finetune.batch_finder.find import memory_limit_bytes
        from finetune.batch_finder.results import FoundBatches
        from finetune.devices.mps.device import MpsDevice
        from finetune.runs.features import stores_features

        mac = replace(mac, limit_bytes=memory_limit_bytes(self.config.search))
        device, texts = MpsDevice(chip=mac.chip), self.measure_texts()
        lengths = [texts.max_tokens] if self.has_max_length else [texts.max_tokens, ARTICLE_TOKENS]
        estimates: list[EstimateResult] = []
        for max_tokens, mode in product(lengths, self.modes):
            case = self.case(device, mode, replace(texts, max_tokens=max_tokens))
            # M1 and M2 compute wrongly on more than so many tokens at once.
            sound = device.shapes.max_examples(padded_length=case.padded_length)
            limit = min(texts.rows, sound or texts.rows)
            self.emit(Info(f"estimating {mode} at {case.padded_length} tokens on {mac.name}"))
            if stores_features(self.config.cache, mode):
                try:
                    estimates.append(estimate_parts(case, mac, stores_features=True, limit=limit))
                except ModelUnsupported as error:
                    message = f"{error.message}: the whole model runs at every step"
                    self.emit(WarningMessage(message))
            estimates.append(estimate_parts(case, mac, stores_features=False, limit=limit))
        return FoundBatches(estimates=tuple(estimates))

    def case(self, device: "Device", mode: Mode, texts: _Texts) -> "Case":
        """Return the case of the longest text, within the model's positions."""
        from finetune.batch_finder.case import Case, architecture_of
        from finetune.model.shape import load_shape, most_positions

        options, training = self.config.model, self.config.training
        shape = load_shape(options.model, revision=options.revision)
        longest = device.shapes.padded_length(texts.max_tokens)
        return Case(
            device.name, architecture_of(shape.to_dict()), classes=texts.outputs, mode=mode,
            padded_length=min(longest, most_positions(shape) or longest),
            precision=training.precision_without_timing, optimizer=training.optimizer,
            gradient_checkpointing=bool(training.gradient_checkpointing) and mode.trains_encoder,
            task=texts.task,
        )  # fmt: skip

    def measure_texts(self) -> _Texts:
        """Read as much of the data as is needed."""
        from finetune.data.dataset import texts_of
        from finetune.data.load import load_splits
        from finetune.data.trec import TRAINING_ROWS
        from finetune.model.source import load_tokenizer
        from finetune.tokenization.encode import encode_texts

        options, model, rows = self.config.data, self.config.model, self.limit
        is_trec = options.data == "trec" and options.data_dir is None
        if rows is None and is_trec:
            rows = min(TRAINING_ROWS, options.max_train_samples or TRAINING_ROWS)
        if self.has_max_length and rows:
            return _Texts(model.max_length, rows)
        try:
            loaded = load_splits(options, emit=self.emit)
            task, rows = loaded.task, rows or len(loaded.splits["train"])
            if self.has_max_length:
                return _Texts(model.max_length, rows, task.name, len(task.output_names))
            tokenizer = load_tokenizer(model.model, revision=model.revision)
        except (DataNotFound, HubNotReachable, ModelNotFound, ModelUnsupported) as error:
            if not is_trec or rows is None:
                raise
            self.emit(
                WarningMessage(
                    f"the length of TREC's texts is not known: {error.message}",
                    remedy=f"batch sizes are for texts of {model.max_length} tokens; "
                    "see --max-length",
                )
            )
            return _Texts(model.max_length, rows)
        lengths = (
            encode_texts(tokenizer, *texts_of(split), max_length=model.max_length).lengths
            for split in loaded.splits.values()
        )
        max_tokens = max(int(one.max()) for one in lengths)
        self.emit(Info(f"the longest text of {options.data} has {max_tokens} tokens"))
        why = "as --limit says" if self.limit else "the rows of the training split; see --limit"
        self.emit(Info(f"batch sizes of up to {rows:,} are tried: {why}"))
        return _Texts(max_tokens, rows, task.name, len(task.output_names))


def _mac_with(memory: str) -> Mac:
    from finetune.config.load import parse_size

    # As Apple writes it, and as the names of Macs have it.
    gibibytes = re.sub(r"(?i)(?<=[\d ])gb$", "GiB", memory.strip())
    memory_bytes = parse_size(gibibytes, source="--memory")
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigurationInvalid(
            f"--memory is {memory!r}, which is less than any Mac has",
            remedy="write for example 16GiB",
        )
    return Mac(f"Mac with {memory}", memory_bytes)


@click.command(cls=GroupedCommand, epilog=EXAMPLES)
@config_option
@chosen_options(*SEARCH_OPTIONS, "device", "precision", "gradient_checkpointing", "optimizer")
@click.option("--limit", type=int, help="Largest size tried. Default: the rows of the data.")
@click.option("--fresh", is_flag=True, help="Search again, even if an earlier search found sizes.")
@click.option(
    "--for",
    "machine",
    metavar="MACHINE",
    shell_complete=completes("plain", MACS),
    help="Estimate for a Mac, such as m1-8gb.",
)
@click.option("--memory", metavar="SIZE", help="Estimate for a Mac with this much memory.")
@click.option(
    "--output-dir",
    default="runs/find-batch",
    shell_complete=complete_folder,
    help="Folder of the JSON and the picture.",
)
@with_display
def command(*, display: Display, **flags: Any) -> None:
    """Find the largest batch size that fits, and the fastest.

    Takes real steps, each device in a child process that may use no more memory than is free.
    Without --freeze-core, --head or --train-layers it searches for all layers, and for the head
    alone.
    """
    with display.progress() as emit:
        found = find_batch(emit=emit, **given(flags))
    display.show(found, lambda: show_batches(found, folder=flags["output_dir"]))


def show_batches(found: "FoundBatches", *, folder: str) -> None:
    """Print a line per device or machine, length and mode, and notes below."""
    results = found.estimates or found.results
    rows = [_cells(result) for result in results]
    titles = list(rows[0])
    show_table(titles, [list(row.values()) for row in rows], numbers=titles[2:])
    notes = [
        f"{result.mode} at {result.padded_length} tokens: features are extracted with "
        f"--eval-batch-size {result.features_batch:,}"
        for result in results
        if result.features_batch
    ]
    if found.estimates:
        modes_by_basis: dict[str, dict[str, None]] = {}
        for one in found.estimates:
            modes_by_basis.setdefault(one.basis, {})[_mode(one)] = None
        title = "These are estimates: nothing was run on such a machine. They are based on"
        bases = (f"{', '.join(modes)}: {basis}" for basis, modes in modes_by_basis.items())
        show_lines(title, *bases, *notes)
        return
    notes += [
        f"{result.mode} at {result.padded_length} tokens: the time limit ended the search; memory "
        f"is predicted to hold {result.predicted_maximum:,} examples"
        for result in found.results
        if result.predicted_maximum
    ]
    show_lines(*notes, f"results and picture: {folder}")


def _cells(result: "BatchResult | EstimateResult") -> dict[str, str]:
    from finetune.batch_finder.results import EstimateResult

    case = {"mode": _mode(result), "tokens": str(result.padded_length)}
    memory = {"GiB": _gibibytes(result.peak_bytes), "of": _gibibytes(result.budget_bytes)}
    if isinstance(result, EstimateResult):
        lowest, highest = f"{result.lowest_batch:,}", f"{result.highest_batch:,}"
        batches = {"batch": f"{result.batch:,}", "from": lowest, "to": highest}
        return {"machine": result.machine} | case | batches | memory
    failed = "-" if result.first_failed is None else f"{result.first_failed:,}"
    return {
        "device": result.device, **case, "largest": f"{result.max_verified:,}", "fails": failed,
        **memory, "fastest": f"{result.fastest:,}", "use": f"{result.recommended:,}",
        "trials": str(len(result.trials)), "s": f"{result.seconds:.0f}",
    }  # fmt: skip


def _gibibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def _mode(result: "BatchResult | EstimateResult") -> str:
    is_unsplit = result.mode != "full" and not result.stores_features
    return f"{result.mode}, no stored features" if is_unsplit else result.mode
