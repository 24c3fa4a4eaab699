"""Measurements (``bench.json``) and tables with published results, without importing torch."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from finetune.bench import Phase
from finetune.files import SCHEMA_VERSION
from finetune.tasks.tables import Table

CPU = "cpu"
ARTICLE_TEXTS, ARTICLE_TOKENS = 1000, 512
_NOT_TIMED = "-"
_TITLES = {
    "mlp": "A network of three layers, forward and backward",
    "inference": "BERT-base on questions, by batch size",
    "training": "BERT-base and DistilBERT: as others trained them, and as finetune run does",
    "apple": "The three networks in Apple's chart of May 2022, which has no numbers",
    "own": "Your own network",
}
_FIGURE = ("group", "workload", "chip", "machine", "year", "source", "rows_per_second")

SideBySide = Mapping[str, "Row"]
"""The rows of a workload and phase by device."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload in one phase on one device.

    Args:
        rows: Rows per step, as published.
        timed_rows: Rows per timed step, or 0 if no step was timed.
        seconds: Measured time per step.
        note: Why fewer rows or no rows were timed.
    """

    group: str
    workload: str
    phase: Phase
    device: str
    rows: int
    timed_rows: int = 0
    seconds: Sequence[float] = ()
    note: str = ""

    def with_note(self, note: str) -> "Row":
        """Return the row with an additional note."""
        return replace(self, note=f"{self.note}; {note}".removeprefix("; "))

    @property
    def rows_per_second(self) -> float | None:
        """The speed from the median step time, or None if nothing was timed."""
        return self.timed_rows / statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """All rows measured on a machine.

    ``machine`` contains its ``cpu``, ``platform``, ``devices`` with descriptions and ``versions``
    of packages. ``texts`` is the source of the text lengths.
    """

    machine: Mapping[str, Any]
    texts: str
    is_quick: bool
    is_complete: bool
    rows: Sequence[Row]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``bench.json``, including published results."""
        rows = [asdict(row) | {"rows_per_second": row.rows_per_second} for row in self.rows]
        return asdict(self) | {"rows": rows, "published": published_for(self.rows)}


@cache
def published() -> list[dict[str, Any]]:
    """Return published results, with chip, year and source."""
    content = yaml.safe_load((files("finetune.bench") / "published.yaml").read_text("utf-8"))
    figures = (dict(zip(_FIGURE, row, strict=True)) for row in content["figures"])
    return [figure | {"url": content["sources"][figure["source"]]} for figure in figures]


def published_for(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return published results for the workloads of these rows."""
    timed = {(row.group, row.workload) for row in rows}
    return [figure for figure in published() if (figure["group"], figure["workload"]) in timed]


def tabulate(results: BenchResults) -> list[Table]:
    """Return, for each group with rows, a table and a table of published results.

    Each line of a table's note is a remark.
    """
    tables = []
    for group in _TITLES:
        if rows := [row for row in results.rows if row.group == group]:
            tables += [_tabulate_measured(group, rows), _tabulate_published(group, rows, results)]
    return [table for table in tables if table.rows]


def by_device(rows: Iterable[Row]) -> dict[tuple[str, Phase], SideBySide]:
    """Group rows by workload and phase, then by device, in order."""
    grouped: dict[tuple[str, Phase], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((row.workload, row.phase), {})[row.device] = row
    return {**grouped}


def crossover_workload(rows: Sequence[Row], device: str) -> str | None:
    """Return the smallest workload at which the device overtakes the CPU, or None.

    The rows of a group are sorted from small to large workloads. Rows without timings are ignored.
    """
    first = None
    for (workload, _), side_by_side in by_device(rows).items():
        if speedup := speedup_of(side_by_side, device):
            first = (first or workload) if speedup > 1 else None
    return first


def speedup_of(side_by_side: SideBySide, device: str) -> float | None:
    """Return the speed of a device divided by the CPU speed, or None if one is unknown."""
    rows = [side_by_side.get(name) for name in (device, CPU)]
    speed, cpu_speed = (row.rows_per_second if row else None for row in rows)
    return speed / cpu_speed if speed and cpu_speed else None


def _tabulate_measured(group: str, rows: Sequence[Row]) -> Table:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    others = devices[1:] if CPU in devices else []
    titles = [f"{device}, {unit}" for device in devices for unit in ("ms per step", "rows/s")]
    titles += [f"{device} ÷ {CPU}" for device in others]
    cells = []
    for (workload, phase), side_by_side in by_device(rows).items():
        values = dict.fromkeys(titles, _NOT_TIMED)
        for device, row in side_by_side.items():
            if speed := row.rows_per_second:
                values[f"{device}, ms per step"] = _milliseconds(row)
                values[f"{device}, rows/s"] = _number(speed)
            values[f"{device} ÷ {CPU}"] = _number(speedup_of(side_by_side, device))
        timed = dict.fromkeys(f"{row.timed_rows:,}" for row in side_by_side.values() if row.seconds)
        rows_timed = ", ".join(timed) or _NOT_TIMED
        cells.append((workload, phase, rows_timed, *(values[title] for title in titles)))
    columns = ("workload", "phase", "rows timed", *titles)
    return Table(_TITLES[group], columns, cells, 2, "\n".join(_remarks(group, rows, others)))


def _remarks(group: str, rows: Sequence[Row], others: Iterable[str]) -> Iterator[str]:
    for row in rows:
        if row.note:
            yield f"{row.workload}, {row.phase}, {row.device}: {row.note}"
    for device in others if group in ("mlp", "inference") else ():
        if any(speedup_of(side_by_side, device) for side_by_side in by_device(rows).values()):
            first = crossover_workload(rows, device)
            workloads = f"from {first} on" if first else "on none of these workloads"
            yield f"{device} is faster than the CPU {workloads}"
    if group == "training":
        yield "a step of finetune run is a pass over the rows, which includes the frozen encoder"


def _tabulate_published(group: str, rows: Sequence[Row], results: BenchResults) -> Table:
    """Return published results next to the speeds of this machine."""
    devices = dict.fromkeys(row.device for row in rows)
    speeds = {(row.workload, row.device): _number(row.rows_per_second) for row in rows}
    figures = published_for(rows)
    columns = (*_FIGURE[1:6], "rows/s", *(f"{device} here" for device in devices))
    cells = [
        (
            *(figure[name] for name in _FIGURE[1:6]),
            _number(figure["rows_per_second"]),
            *(speeds.get((figure["workload"], device), _NOT_TIMED) for device in devices),
        )
        for figure in figures
    ]
    remarks = [f"{figure['source']}: {figure['url']}" for figure in figures]
    remarks += [
        f"nobody has published these workloads for {chip}: finetune bench --contribute prints rows "
        "to add"
        for chip in (chip_of(results.machine, device) for device in devices)
        if not any(figure["chip"] == chip for figure in figures)
    ]
    note = "\n".join(dict.fromkeys(remarks))
    return Table(f"{_TITLES[group]} (published)", columns, cells, 5, note)


def chip_of(machine: Mapping[str, Any], device: str) -> str:
    """Return the chip of a device, with its name in the published results if known."""
    cpu: str = machine["cpu"]
    description: str = machine["devices"].get(device, "")
    if device == CPU or cpu.startswith("Apple"):
        return cpu.removeprefix("Apple ")
    words = description.partition(",")[0].replace("-", " ").split()
    known = (figure["chip"] for figure in published())
    return next((chip for chip in known if chip in words), description)


def rows_to_contribute(results: Mapping[str, Any]) -> list[list[Any]]:
    """Convert the content of ``bench.json`` to rows for ``published.yaml``."""
    machine, year = results["machine"], str(date.today().year)
    known = {(figure["group"], figure["workload"]) for figure in published()}
    return [
        [
            *(row["group"], row["workload"], chip_of(machine, row["device"])),
            machine["devices"][row["device"]],
            *(year, "YOUR NAME", float(f"{row['rows_per_second']:.3g}")),
        ]
        for row in results["rows"]
        if (row["group"], row["workload"]) in known and row["rows_per_second"]
    ]


def _milliseconds(row: Row) -> str:
    seconds = (statistics.median(row.seconds), min(row.seconds), max(row.seconds))
    median, lowest, highest = (_number(1e3 * value) for value in seconds)
    return f"{median} ({lowest}–{highest})" if len(row.seconds) > 1 else median


def _number(value: float | None) -> str:
    """Format a number with at least three significant digits."""
    if value is None:
        return _NOT_TIMED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
