"""A bench on this machine: how long it takes, then its rows."""

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import transformers

import finetune
from finetune.bench.results import BenchResults, Machine, Row
from finetune.bench.sizes import MAX_SEARCH_SECONDS, find_article_sizes
from finetune.bench.supervisor import Supervisor
from finetune.bench.timer import VISITS
from finetune.bench.workload import measure_products
from finetune.bench.workloads import AutoTunedOption, list_workloads
from finetune.devices.base import Device
from finetune.devices.host import cpu_name
from finetune.events import Emit, Info
from finetune.report.templates import duration

_LIBRARIES = (finetune, torch, transformers)


@dataclass
class Session:
    """What is timed, and what was measured so far.

    Args:
        texts: Where the lengths of the choice's texts are from.
        rows: By their places.
    """

    choice: AutoTunedOption
    devices: Sequence[Device]
    texts: str
    emit: Emit
    rows: dict[tuple[str, ...], Row] = field(default_factory=dict)

    def measure(self, supervisor: Supervisor) -> None:
        """Time all workloads; say before about how long all takes."""
        is_searched = "training" in self.choice.groups and not self.choice.is_quick
        searched = self.devices if is_searched else []
        seconds = self._estimate_seconds() + len(searched) * MAX_SEARCH_SECONDS
        self.emit(Info(f"this takes about {duration(seconds)}"))
        self.choice = replace(self.choice, found=find_article_sizes(searched, emit=self.emit))
        workloads = list_workloads(self.choice)
        timed = supervisor.time_all(
            self.choice,
            workloads,
            [one.name for one in self.devices],
            until=time.time() + self.choice.effort.total_seconds,
        )
        for number, workload in enumerate(workloads, start=1):
            self.emit(Info(f"{number}/{len(workloads)} {workload.group}: {workload.name}"))
            self._keep(next(timed))
        for rows in timed:
            self._keep(rows)
            self.emit(Info(f"timed again, while time is left: {rows[0].group}: {rows[0].workload}"))

    def _keep(self, rows: Iterable[Row]) -> None:
        self.rows |= {row.place: row for row in rows}

    def _estimate_seconds(self) -> float:
        effort, workloads = self.choice.effort, list_workloads(self.choice)
        once = sum(
            workload.estimate_seconds(gigaflops_a_second=speed, effort=effort)
            for speed in map(measure_products, self.devices)
            for workload in workloads
        )
        return max(once, min(VISITS * once, effort.total_seconds))

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
            rows=tuple(self.rows.values()),
            found_batches=self.choice.found,
        )
