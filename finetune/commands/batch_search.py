"""A search for batch sizes on this machine's devices, or an estimate for a Mac that is not here."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.child import Child
from finetune.batch_finder.estimate import estimate_parts
from finetune.batch_finder.find import Search, find_parts, memory_limit_bytes
from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches, least_of
from finetune.config.load import parse_size
from finetune.config.mode import Mode
from finetune.config.schema import Config, mode_of, precision_without_timing
from finetune.data.dataset import texts_of
from finetune.data.trec import TRAINING_ROWS
from finetune.devices.base import Device
from finetune.devices.mps.chips import Mac, find_mac
from finetune.devices.mps.device import MpsDevice
from finetune.devices.select import select_device, usable_devices
from finetune.distributed.processes import Processes, join_processes
from finetune.errors import (
    BatchDoesNotFit,
    ConfigurationInvalid,
    DataNotFound,
    HubNotReachable,
    ModelNotFound,
    ModelUnsupported,
)
from finetune.events import Emit, Info, WarningMessage, ignore
from finetune.files import write_json, write_text_atomically
from finetune.model.shape import load_shape, most_positions
from finetune.model.source import load_tokenizer
from finetune.report.batches import draw_batches
from finetune.report.chart import picture_of
from finetune.runs.cache import cache_folder
from finetune.runs.data import load_run_data
from finetune.runs.features import stores_features
from finetune.runs.folder import check_writable
from finetune.tasks.single import Single
from finetune.tokenization.encode import encode_texts

# The article padded every text to this length.
ARTICLE_TOKENS = 512
MIN_MEMORY_BYTES = 2**30


@dataclass(frozen=True)
class Request:
    """What batch sizes are looked for.

    Args:
        config: All options.
        has_max_length: Whether the user has given the length, in place of the data's own.
        limit: Largest batch size worth trying; None for the rows of the data.
        emit: Receives progress events.
    """

    config: Config
    has_max_length: bool
    limit: int | None
    emit: Emit

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode that the options name, or else ``full`` and ``head``."""
        mode = mode_of(self.config.model)
        return (mode, Mode("head")) if mode == "full" else (mode,)

    def case(self, device: Device, mode: Mode, texts: "_Texts") -> Case:
        """Return the case of the longest of some texts, within the model's positions."""
        options, training = self.config.model, self.config.training
        shape = load_shape(options.model, revision=options.revision)
        longest = device.shapes.padded_length(texts.longest_tokens)
        return Case(
            device.name, architecture_of(shape.to_dict()), classes=texts.outputs, mode=mode,
            padded_length=min(longest, most_positions(shape) or longest),
            precision=precision_without_timing(training), optimizer=training.optimizer,
            gradient_checkpointing=bool(training.gradient_checkpointing) and mode.trains_encoder,
            task=texts.task,
        )  # fmt: skip


@dataclass(frozen=True)
class _Texts:
    """What is known of the data.

    Args:
        longest_tokens: Of the longest text.
        rows: The largest batch size of interest.
        task: The kind of the labels; where they are not read, that of most tables.
        outputs: Of the model; where they are not known, TREC's: they change next to nothing.
    """

    longest_tokens: int
    rows: int
    task: str = Single.name
    outputs: int = 6


def search_batches(
    request: Request, spares: list[Child], *, is_fresh: bool, output_dir: Path | None
) -> FoundBatches:
    """Search on every device that the options allow, in each mode; write what was found.

    Args:
        request: What is looked for.
        spares: Children that the first search takes.
        is_fresh: Search even if an earlier search has found the batch sizes.
        output_dir: Where to write; None for nowhere.
    """
    processes = join_processes()
    if not processes.is_main:
        request = replace(request, emit=ignore)
    if output_dir is not None:
        processes.broadcast(lambda: check_writable(output_dir))
    results = tuple(_search_devices(request, processes, spares, is_fresh=is_fresh))
    if not any(result.max_verified for result in results):
        raise BatchDoesNotFit(
            "not even a batch of one example fits in memory",
            remedy="lower --max-length, choose a smaller --model, or raise --memory-limit",
        )
    found = FoundBatches(results=results)
    if output_dir is not None and processes.is_main:
        _write(found, output_dir)
    return found


def _search_devices(
    request: Request, processes: Processes, spares: list[Child], *, is_fresh: bool
) -> Iterator[BatchResult]:
    """Of several processes each tries its own device, and the least is taken."""
    config = request.config
    # An invalid limit is refused before anything is loaded.
    memory_limit_bytes(config.search)
    texts = _measure_data(request)
    cache = None if is_fresh else cache_folder(config.cache, "batches")
    devices: Iterable[Device] = usable_devices(emit=request.emit)
    if (choice := config.training.device) != "auto":
        devices = [select_device(choice, emit=request.emit)]
    for device in devices:
        together = processes.on(device)
        for mode in request.modes:
            own = find_parts(
                request.case(device, mode, texts),
                Search(device, config.search, texts.rows, None, cache, request.emit, spares),
                stores_features=stores_features(config.cache, mode),
            )
            yield least_of(together.gather(own))


def _write(found: FoundBatches, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "find-batch.json", found.to_json())
    if charts := draw_batches(found.results):
        write_text_atomically(folder / "find-batch.svg", picture_of(charts))


def estimate_batches(request: Request, *, machine: str | None, memory: str | None) -> FoundBatches:
    """Estimate the batch sizes of a Mac by its name, or by its memory alone."""
    mac = find_mac(machine) if machine is not None else _mac_with(memory or "")
    mac = replace(mac, limit_bytes=memory_limit_bytes(request.config.search))
    return FoundBatches(estimates=tuple(_estimate(request, mac)))


def _estimate(request: Request, mac: Mac) -> Iterator[EstimateResult]:
    """Estimate each length and mode, with stored features and without."""
    texts = _measure_data(request)
    device = MpsDevice(chip=mac.chip)
    both = [texts, replace(texts, longest_tokens=ARTICLE_TOKENS)]
    for each in both[:1] if request.has_max_length else both:
        estimates: list[EstimateResult] = []
        for mode in request.modes:
            case = request.case(device, mode, each)
            request.emit(Info(f"estimating {mode} at {case.padded_length} tokens on {mac.name}"))
            estimates += _estimate_case(request, case, mac, limit=texts.rows)
        _warn_of_wrong_results(device, estimates, emit=request.emit)
        yield from estimates


def _estimate_case(
    request: Request, case: Case, mac: Mac, *, limit: int
) -> Iterator[EstimateResult]:
    """Estimate a case with stored features, if the model can be split, and without."""
    if stores_features(request.config.cache, case.mode):
        try:
            yield estimate_parts(case, mac, stores_features=True, limit=limit)
        except ModelUnsupported as error:
            request.emit(WarningMessage(f"{error.message}: the whole model runs at every step"))
    yield estimate_parts(case, mac, stores_features=False, limit=limit)


def _warn_of_wrong_results(device: Device, estimates: list[EstimateResult], *, emit: Emit) -> None:
    """Warn where memory allows more examples of a padded length than the device computes right."""
    padded_length = estimates[0].padded_length
    most = device.shapes.max_examples(padded_length=padded_length)
    # Where features are stored, only their extraction is sure to see all tokens.
    if most is not None and max(one.features_batch or one.batch for one in estimates) > most:
        message = f"more than {most:,} examples of {padded_length} tokens fit"
        remedy = (
            f"a run takes no more: on M1 and M2 {device.name} computes wrongly on more than "
            f"{device.shapes.max_tokens:,} tokens at once"
        )
        emit(WarningMessage(message, remedy=remedy))


def _mac_with(memory: str) -> Mac:
    # As Apple writes it, and as the names of Macs have it.
    gibibytes = re.sub(r"(?i)(?<=[\d ])gb$", "GiB", memory.strip())
    memory_bytes = parse_size(gibibytes, source="--memory")
    if memory_bytes < MIN_MEMORY_BYTES:
        problem = f"--memory is {memory!r}, which is less than any Mac has"
        raise ConfigurationInvalid(problem, remedy="write for example 16GiB")
    return Mac(f"Mac with {memory}", memory_bytes)


def _measure_data(request: Request) -> _Texts:
    """Read as much of the data as is needed."""
    options, model = request.config.data, request.config.model
    is_published = options.data == "trec" and options.data_dir is None
    most = request.limit
    if most is None and is_published:
        most = min(TRAINING_ROWS, options.max_train_samples or TRAINING_ROWS)
    if request.has_max_length and most:
        return _Texts(model.max_length, most)
    try:
        loaded = load_run_data(options, emit=request.emit)
        table, kind = loaded.splits, loaded.task
        rows = most or len(table["train"])
        found = _Texts(model.max_length, rows, kind.name, len(kind.output_names))
        if request.has_max_length:
            return found
        tokenizer = load_tokenizer(model.model, revision=model.revision)
    except (DataNotFound, HubNotReachable, ModelNotFound, ModelUnsupported) as error:
        if not (is_published and most):
            raise
        message = f"the length of {options.data}'s texts is not known: {error.message}"
        remedy = f"batch sizes are for texts of {model.max_length} tokens; see --max-length"
        request.emit(WarningMessage(message, remedy=remedy))
        return _Texts(model.max_length, most)
    longest_tokens = max(
        int(encode_texts(tokenizer, *texts_of(split), max_length=model.max_length).lengths.max())
        for split in table.values()
    )
    request.emit(Info(f"the longest text of {options.data} has {longest_tokens} tokens"))
    why = "as --limit says" if request.limit else "the rows of the training split; see --limit"
    request.emit(Info(f"batch sizes of up to {found.rows:,} are tried: {why}"))
    return replace(found, longest_tokens=longest_tokens)
