"""Measurements (``bench.json``) and their tables next to published results, without torch."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import yaml

from finetune.bench import GROUPS, Phase
from finetune.tasks.tables import Table

CPU = "cpu"
ARTICLE_TEXTS = 1000
ARTICLE_TOKENS = 512
_NOT_TIMED = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload in one phase on one device.

    Args:
        rows: Rows per step, as published.
        timed_rows: Rows per timed step; 0 if no step was timed.
        seconds: Measured time per step.
        note: Why fewer rows were timed, or none.
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
        """Return the row with a note, after the one it has."""
        return replace(self, note=f"{self.note}; {note}".removeprefix("; "))

    @property
    def rows_per_second(self) -> float | None:
        """From the median time of a step, None if nothing was timed."""
        return self.timed_rows / statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it was measured: devices by name, versions of Python and the packages that compute."""

    cpu: str
    platform: str
    devices: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """All rows measured on a machine; ``texts`` is the source of the text lengths."""

    machine: Machine
    texts: str
    is_quick: bool
    is_complete: bool
    rows: Sequence[Row]
    schema_version: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``bench.json``; its readers get the rows a second as well."""
        rows = [asdict(row) | {"rows_per_second": row.rows_per_second} for row in self.rows]
        return asdict(self) | {"rows": rows}


_TITLES = {
    "mlp": "A network of three layers, forward and backward",
    "inference": "BERT-base on questions, by batch size",
    "training": "BERT-base on 1,000 questions: as the article trained it, and as finetune run does",
    "apple": "Three networks of Apple's chart of May 2022, which names no numbers",
    "own": "Your own",
}


@dataclass(frozen=True)
class BenchTable(Table):
    """A table of a group, or of a comparison; ``source`` is the publisher of its numbers."""

    text_columns: int = 2
    group: str = ""
    remarks: tuple[str, ...] = ()
    source: str = ""


def tabulate(results: BenchResults) -> list[BenchTable]:
    """Return a table of each group that has rows, and after it what was published."""
    published = yaml.safe_load((files("finetune.bench") / "published.yaml").read_text("utf-8"))
    tables = []
    for group in (*GROUPS, "own"):
        if rows := [row for row in results.rows if row.group == group]:
            tables.append(_measured(group, rows))
            if table := published.get(group):
                tables.append(BenchTable("The article's", **table, group=group))
    return tables


def by_device(rows: Iterable[Row]) -> dict[tuple[str, Phase], dict[str, Row]]:
    """Return the rows of each workload and phase of a group by their device, in order."""
    grouped: dict[tuple[str, Phase], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((row.workload, row.phase), {})[row.device] = row
    return grouped


def crossover_workload(rows: Sequence[Row], device: str) -> str | None:
    """Return the workload from which on a device is faster than the CPU; None if never.

    The rows of a group go from small workloads to large ones; what failed says nothing.
    """
    first = None
    for (workload, _), side_by_side in by_device(rows).items():
        if speedup := speedup_of(side_by_side, device):
            first = (first or workload) if speedup > 1 else None
    return first


def speedup_of(side_by_side: Mapping[str, Row], device: str) -> float | None:
    """Return the rows a second of a device over the CPU's in the same run, None if not known."""
    rows = [side_by_side.get(name) for name in (device, CPU)]
    speed, cpu_speed = (row.rows_per_second if row else None for row in rows)
    return speed / cpu_speed if speed and cpu_speed else None


def _measured(group: str, rows: Sequence[Row]) -> BenchTable:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    others = devices[1:] if CPU in devices else []
    titles = [f"{device}, {unit}" for device in devices for unit in ("ms a step", "rows/s")]
    titles += [f"{device} ÷ {CPU}" for device in others]
    cells = []
    for (workload, phase), side_by_side in by_device(rows).items():
        values = dict.fromkeys(titles, _NOT_TIMED)
        for device, row in side_by_side.items():
            if speed := row.rows_per_second:
                values[f"{device}, ms a step"] = _milliseconds(row)
                values[f"{device}, rows/s"] = _number(speed)
            values[f"{device} ÷ {CPU}"] = _number(speedup_of(side_by_side, device))
        timed = dict.fromkeys(f"{row.timed_rows:,}" for row in side_by_side.values() if row.seconds)
        rows_timed = ", ".join(timed) or _NOT_TIMED
        cells.append((workload, phase, rows_timed, *(values[title] for title in titles)))
    return BenchTable(
        group=group,
        title=_TITLES[group],
        columns=("workload", "phase", "rows timed", *titles),
        rows=cells,
        remarks=(*_remarks(group, rows, others),),
    )


def _remarks(group: str, rows: Sequence[Row], others: Iterable[str]) -> Iterator[str]:
    for row in rows:
        if row.note:
            published = f"; published are {row.rows:,} rows" if row.timed_rows else ""
            yield f"{row.workload}, {row.phase}, {row.device}: {row.note}{published}"
    for device in others if group in ("mlp", "inference") else ():
        if any(speedup_of(side_by_side, device) for side_by_side in by_device(rows).values()):
            first = crossover_workload(rows, device)
            where = f"from {first} on" if first else "at none of these"
            yield f"{device} is faster than the CPU {where}"
    if group == "training":
        yield "a step of finetune run is a pass over the rows, with a frozen encoder's features"


def _milliseconds(row: Row) -> str:
    seconds = (statistics.median(row.seconds), min(row.seconds), max(row.seconds))
    median, lowest, highest = (_number(1e3 * value) for value in seconds)
    return f"{median} ({lowest}–{highest})" if len(row.seconds) > 1 else median


def _number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return _NOT_TIMED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
