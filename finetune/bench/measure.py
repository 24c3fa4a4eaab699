"""Has a child process time workloads, and goes on with another where a device ends it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from finetune.batch_finder.child import Child, ChildEnded
from finetune.bench.results import Row
from finetune.errors import FinetuneError, TrialFailed
from finetune.events import Emit, WarningMessage

if TYPE_CHECKING:
    from finetune.bench.workloads import Selection, Workload
    from finetune.devices.base import Device

TIMING = "finetune.bench.timing"
SEARCH_SECONDS = 30.0
"""Of a search for one device and mode."""


def measure(
    children: list[Child],
    selection: "Selection",
    workloads: Sequence["Workload"],
    devices: Sequence[str],
    *,
    until: float,
    module: str = TIMING,
) -> Iterator[list[Row]]:
    """Yield the rows of each workload in order; then, until a time, some again with more timings.

    ``children`` holds one that runs the module; another takes its place where it ends. It makes the
    workloads from the selection as well.
    """
    done = 0
    lost: list[Row] = []
    while done < len(workloads):
        running: str | None = None
        [child] = children
        child.send(
            {
                "selection": asdict(selection),
                "devices": devices,
                "first": done,
                "skipped": [row.device for row in lost],
                "until": until,
            }
        )
        try:
            while True:
                reply = child.receive(seconds=1.0) or {}
                running = reply.get("begins", running)
                if "rows" in reply:
                    done, running = done + 1, None
                    rows = [
                        Row(**row | {"seconds": tuple(row["seconds"])}) for row in reply["rows"]
                    ]
                    yield lost + rows
                    lost = []
        except ChildEnded:
            if done >= len(workloads):
                return
            if running is None or any(row.device == running for row in lost):
                raise FinetuneError(
                    child.describe_end(), remedy="see what finetune doctor says of the machine"
                ) from None
            workload = workloads[done]
            note = f"the process {child.exit_status()}"
            lost += [workload.row(phase, running, note=note) for phase in workload.phases]
            child.kill()
            children[:] = [Child(module)]


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
