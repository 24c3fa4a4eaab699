"""Has a child process time workloads, and goes on with another where a device ends it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from finetune.batch_finder.child import Child, ChildEnded
from finetune.bench.results import Row
from finetune.errors import FinetuneError, TrialFailed
from finetune.events import Emit, Info, WarningMessage

if TYPE_CHECKING:
    from finetune.bench.workloads import Selection, Workload
    from finetune.devices.base import Device

TIMING = "finetune.bench.timing"
MAX_REPEATS = 4
"""Of a workload. Where they differ by chance alone, the ranges of four repeats in each of two
benches do not meet in 3 of 100 cases, those of two repeats in 33."""
FULL_SECONDS, QUICK_SECONDS = 420.0, 45.0
"""Once they are over, no workload is repeated."""
SEARCH_SECONDS = 30.0
"""Of a search for one device and mode."""


def measure(
    children: list[Child],
    selection: "Selection",
    workloads: Sequence["Workload"],
    devices: Sequence[str],
    *,
    until: float,
    emit: Emit,
    module: str = TIMING,
) -> Iterator[list[Row]]:
    """Yield the rows of each workload on each device; then again with more, while time is left.

    Other load comes and goes, so the timings are spread out instead of taken back to back.
    ``children`` holds one that runs the module; another takes its place where it ends.
    """
    first = {"selection": asdict(selection), "devices": devices}
    _request(children[0], first)
    rows = {
        (number, device): [workload.row(phase, device) for phase in workload.phases]
        for number, workload in enumerate(workloads)
        for device in devices
        if workload.device in (None, device)
    }
    seconds = dict.fromkeys(rows, 0.0)
    for repeat in range(MAX_REPEATS):
        for number, device in rows:
            pair = (number, device)
            timed = [row for row in rows[pair] if row.seconds or not repeat]
            if not timed or (repeat and time.time() + seconds[pair] > until):
                continue
            name = f"{workloads[number].group}: {workloads[number].name}, {device}"
            place = f"{number + 1}/{len(workloads)}" if not repeat else "again, while time is left:"
            emit(Info(f"{place} {name}"))
            started = time.time()
            request = {"workload": number, "device": device, "rows": [*map(asdict, timed)]}
            try:
                children[0].send(request)
                timed = [Row.from_json(row) for row in _receive(children[0])]
            except ChildEnded:
                note = f"the process {children[0].exit_status()}"
                timed = [row.with_note(note) for row in timed]
                children[0].kill()
                children[:] = [Child(module)]
                _request(children[0], first)
                seconds[pair] = float("inf")
            else:
                seconds[pair] = time.time() - started
            rows[pair] = timed
            yield timed


def _request(child: Child, first: dict[str, Any]) -> None:
    """Send the first request and wait until the child is ready."""
    child.send(first)
    try:
        _receive(child)
    except ChildEnded:
        remedy = "see what finetune doctor says of the machine"
        raise FinetuneError(child.describe_end(), remedy=remedy) from None


def _receive(child: Child) -> Any:
    while (reply := child.receive(seconds=1.0)) is None:
        pass
    return reply


def find_article_sizes(devices: Iterable["Device"], *, emit: Emit) -> dict[str, dict[str, int]]:
    """Return the batch sizes that ``find-batch`` recommends for the article's rows."""
    from finetune.batch_finder.case import Case, architecture_of
    from finetune.batch_finder.find import Search, find_parts
    from finetune.bench.tables import ARTICLE_TEXTS, ARTICLE_TOKENS
    from finetune.bench.workloads import CLASSES, MODES
    from finetune.config.schema import SearchConfig
    from finetune.model.shape import load_shape

    architecture = architecture_of(load_shape("bert-base-uncased", revision=None).to_dict())
    options = SearchConfig(time_limit=SEARCH_SECONDS)
    found: dict[str, dict[str, int]] = {}
    for device in devices:
        for mode in MODES:
            case = Case(
                device.name, architecture, CLASSES, mode, ARTICLE_TOKENS, precision="fp32",
                optimizer="adamw", gradient_checkpointing=False,
            )  # fmt: skip
            # On two cores a trial of four rows takes longer than the search may.
            search = Search(device, options, ARTICLE_TEXTS, first=1, cache=None, emit=emit)
            try:
                size = find_parts(case, search, stores_features=False).recommended
            except TrialFailed as error:
                emit(WarningMessage(error.message, remedy=error.remedy))
                continue
            if size:
                found.setdefault(device.name, {})[mode] = size
    return found
