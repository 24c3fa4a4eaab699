"""``finetune bench`` as a function."""

import platform
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers

import finetune
from finetune.bench.bert import TREC_FILE, read_lengths
from finetune.bench.groups import GROUPS, Group
from finetune.bench.results import BenchResults, Machine, Row
from finetune.bench.sizes import MOST_SEARCH_SECONDS, find_article_sizes
from finetune.bench.supervisor import time_all
from finetune.bench.timer import FULL, QUICK, estimate_seconds, measure_products
from finetune.bench.workload import Workload
from finetune.bench.workloads import Choice, list_workloads
from finetune.devices.base import Device
from finetune.devices.host import cpu_name
from finetune.devices.select import select_device, usable_devices
from finetune.errors import Interrupted
from finetune.events import Emit, Stage, ignore
from finetune.files import write_json, write_text_atomically
from finetune.report.bench import PICTURES, render_bench, standalone
from finetune.report.templates import duration
from finetune.runs.folder import check_writable
from finetune.training.interruption import signal_of

_LIBRARIES = (finetune, torch, transformers)


def run_bench(
    groups: Sequence[Group] = GROUPS,
    *,
    output_dir: Path,
    devices: Sequence[str] = (),
    model: str | None = None,
    data_dir: Path | None = None,
    quick: bool = False,
    emit: Emit = ignore,
) -> BenchResults:
    """Time workloads on the devices of this machine; write ``bench.json`` and ``bench.html``.

    Args:
        groups: Of workloads.
        output_dir: Folder of the files; those of an earlier bench are replaced.
        devices: Their names; none for all that work.
        model: A network of the user's own, ``package.module:function``, to be timed as well.
        data_dir: Folder of TREC's raw files; None for the questions of the package.
        quick: Whether to time few rows, and not for long.
        emit: Receives progress events.

    Raises:
        DeviceNotAvailable: If a device that is named can't be used.
        UsageError: If the model or the folder can't be used.
        DataNotFound: If TREC's training file is not there.
        Interrupted: If the user stopped it; what was measured is written.
    """
    check_writable(output_dir)
    chosen = [select_device(name, emit=emit) for name in dict.fromkeys(devices)]
    bench = _Bench(
        Choice(groups=groups, model=model, lengths=read_lengths(data_dir), is_quick=quick),
        devices=chosen or [*usable_devices(emit=emit)],
        texts="questions" if data_dir is None else TREC_FILE,
        emit=emit,
    )
    try:
        bench.measure()
    except KeyboardInterrupt as stop:
        write_bench(bench.results(is_complete=False), output_dir)
        raise Interrupted(
            "stopped before the end",
            remedy=f"see what was measured in {output_dir}, or run the command again",
            signal_number=signal_of(stop),
        ) from None
    results = bench.results(is_complete=True)
    write_bench(results, output_dir)
    return results


def write_bench(results: BenchResults, folder: Path) -> None:
    """Write results as ``bench.json``, ``bench.html`` and pictures that need no page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", results.to_json())
    write_text_atomically(folder / "bench.html", render_bench(results))
    for name, draw in PICTURES.items():
        if picture := draw(results):
            write_text_atomically(folder / f"{name}.svg", standalone(picture))


@dataclass
class _Bench:
    choice: Choice
    devices: Sequence[Device]
    texts: str
    emit: Emit
    rows: list[Row] = field(default_factory=list)

    def measure(self) -> None:
        """Time all workloads; say before how long all takes, and on the way how long is left."""
        effort = QUICK if self.choice.is_quick else FULL
        products = {device.name: measure_products(device) for device in self.devices}
        searches = self.devices if "training" in self.choice.groups else []
        if self.choice.is_quick:
            searches = []

        def expect(workloads: Sequence[Workload]) -> list[float]:
            return [
                sum(
                    estimate_seconds(one, gigaflops_a_second=speed, effort=effort)
                    for name, speed in products.items()
                    if one.is_for(name)
                )
                for one in workloads
            ]

        seconds = sum(expect(list_workloads(self.choice))) + len(searches) * MOST_SEARCH_SECONDS
        self.emit(Stage(f"this takes about {duration(seconds)}"))
        self.choice = replace(self.choice, found=find_article_sizes(searches, emit=self.emit))
        workloads = list_workloads(self.choice)
        self._time(workloads, expect(workloads))

    def _time(self, workloads: Sequence[Workload], expected: Sequence[float]) -> None:
        names = [device.name for device in self.devices]
        started = time.perf_counter()
        with closing(time_all(self.choice, workloads, names)) as timed:
            for index, workload in enumerate(workloads):
                past, left = sum(expected[:index]), sum(expected[index:])
                pace = (time.perf_counter() - started) / past if past > left / 8 else 1.0
                self.emit(
                    Stage(
                        f"{index + 1}/{len(workloads)} {workload.group}: {workload.name}, about "
                        f"{duration(pace * left)} left"
                    )
                )
                self.rows += next(timed)

    def results(self, *, is_complete: bool) -> BenchResults:
        """Return what was measured so far."""
        versions = {one.__name__: str(one.__version__) for one in _LIBRARIES}
        return BenchResults(
            machine=Machine(
                cpu=cpu_name(),
                platform=platform.platform(),
                devices={device.name: device.description for device in self.devices},
                versions={"python": platform.python_version(), **versions},
            ),
            texts=self.texts,
            is_quick=self.choice.is_quick,
            is_complete=is_complete,
            rows=tuple(self.rows),
            found_batches=self.choice.found,
        )
