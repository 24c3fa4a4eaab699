"""The results of a bench, or of two side by side, as tables; and what others have published."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.bench.results import GROUPS, BenchResults, Row
from finetune.tasks.tables import Table

CPU = "cpu"
ARTICLE_TEXTS = 1000
ARTICLE_TOKENS = 512
# Medians of two runs that differ by more say that something else was at work.
_STEADY = 1.1
_NOT_TIMED = "-"
_TITLES = {
    "mlp": "A network of three layers, forward and backward",
    "inference": "BERT-base on questions, by batch size",
    "training": "BERT-base on 1,000 questions: as the article trained it, and as finetune run does",
    "apple": "Three networks of Apple's chart",
    "own": "Your own",
}
Key = tuple[str, str, str]
"""Group, workload and phase."""


@dataclass(frozen=True, kw_only=True)
class BenchTable(Table):
    """A table of a group, or of a comparison; ``source`` says who published its numbers."""

    text_columns: int = 2
    group: str = ""
    remarks: tuple[str, ...] = ()
    source: str = ""


_ARTICLE = (
    "Published in May 2022, not measured here: the article on TREC, on a MacBook Pro with a base "
    "M1 and 8 GB"
)
PUBLISHED = {
    "training": BenchTable(
        group="training",
        title="The article's",
        columns=("mode", "device", "batch", "rows/s", f"{ARTICLE_TEXTS:,} rows"),
        # The article's own rates, though a thousand rows in 18 minutes are fewer.
        rows=(
            ("full", "CPU", "32", "0.69", "24 min 13 s"),
            ("full", "MPS", "1", "1.25", "about 18 min"),
            ("head only: the classifier", "CPU", "64", "1.95", "8 min 32 s"),
            ("head only: the classifier", "MPS", "64", "4.18", "3 min 59 s"),
        ),
        source=f"{_ARTICLE}; with all of the model in training a batch of 1 was the largest that "
        "fitted MPS",
    ),
    "inference": BenchTable(
        group="inference",
        title="The article's",
        columns=("workload", "phase", "CPU, ms a step", "MPS, ms a step"),
        rows=(
            ("batch 8", "evaluation", "79", "189"),
            ("batch 64", "evaluation", "547", "345"),
            ("batch 256", "evaluation", "3,690", "1,560"),
        ),
        source=_ARTICLE,
    ),
    "apple": BenchTable(
        group="apple",
        title="Apple's",
        columns=(),
        rows=(),
        source="Apple published a chart of speed-ups over the CPU in May 2022 (pytorch.org, "
        "Introducing Accelerated PyTorch Training on Mac), measured on a Mac Studio with an M1 "
        "Ultra; it names no numbers, so that none stand here",
    ),
}
"""By group; shown beside what is measured and never among it."""


def tabulate(results: BenchResults) -> list[BenchTable]:
    """Return a table of each group that has rows, and after it what was published."""
    tables = []
    for group in (*GROUPS, "own"):
        if rows := results.of(group):
            tables.append(_measured(group, rows))
            tables += [PUBLISHED[group]] if group in PUBLISHED else []
    return tables


def by_device(rows: Iterable[Row]) -> dict[Key, dict[str, Row]]:
    """Return the rows of each workload by their device, in order."""
    grouped: dict[Key, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((row.group, row.workload, row.phase), {})[row.device] = row
    return grouped


def first_faster(rows: Sequence[Row], device: str) -> str | None:
    """Return the workload from which on a device is faster than the CPU; None if never.

    The rows of a group go from small workloads to large ones; what failed says nothing.
    """
    first = None
    for (_, workload, _), side_by_side in by_device(rows).items():
        if speedup := speedup_of(side_by_side, device):
            first = (first or workload) if speedup > 1 else None
    return first


def speedup_of(side_by_side: Mapping[str, Row], device: str) -> float | None:
    """Return the rows a second of a device over the CPU's in the same run, None if not known."""
    return _divide(_speed(side_by_side.get(device)), _speed(side_by_side.get(CPU)))


def _measured(group: str, rows: Sequence[Row]) -> BenchTable:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    others = devices[1:] if CPU in devices else []
    has_minutes = group == "training"
    titles = ["workload", "phase", "rows"]
    titles += [f"{device}, {unit}" for device in devices for unit in ("ms a step", "rows/s")]
    titles += [f"{device}, min for {ARTICLE_TEXTS:,}" for device in devices if has_minutes]
    titles += [f"{device} ÷ {CPU}" for device in others]
    cells = []
    for (_, workload, phase), side_by_side in by_device(rows).items():
        line = [workload, phase, f"{next(iter(side_by_side.values())).rows:,}"]
        for device in devices:
            row = side_by_side.get(device)
            line += [_milliseconds(row), _number(_speed(row))]
        for device in devices if has_minutes else ():
            speed = _speed(side_by_side.get(device))
            line.append(f"{ARTICLE_TEXTS / speed / 60:.2f}" if speed else _NOT_TIMED)
        cells.append((*line, *(_ratio(speedup_of(side_by_side, one)) for one in others)))
    return BenchTable(
        group=group,
        title=_TITLES[group],
        columns=tuple(titles),
        rows=cells,
        remarks=(*_remarks(group, rows, others),),
    )


def _remarks(group: str, rows: Sequence[Row], others: Iterable[str]) -> Iterator[str]:
    for row in rows:
        if row.note:
            timed = f"; {row.timed_rows:,} were timed" if row.timed_rows else ""
            yield f"{row.workload}, {row.phase}, {row.device}: {row.note}{timed}"
    for device in others if group in ("mlp", "inference") else ():
        if any(speedup_of(one, device) for one in by_device(rows).values()):
            first = first_faster(rows, device)
            where = f"from {first} on" if first else "at none of these"
            yield f"{device} is faster than the CPU {where}"
    if group != "training":
        return
    speeds = {(row.device, row.workload): row.rows_per_second for row in rows}
    for (device, workload), speed in speeds.items():
        mode, _, batch = workload.partition(f", {ARTICLE_TOKENS} tokens, ")
        times = _divide(speeds.get((device, f"{mode}, as finetune run")), speed)
        if batch and times:
            yield (
                f"{device}, {mode}: finetune run is {times:.1f} times as fast as "
                f"{ARTICLE_TOKENS} tokens, {batch}"
            )
    yield (
        f"minutes for one pass over {ARTICLE_TEXTS:,} rows are extrapolated from the rows a "
        "second; a step of finetune run is a pass over the rows that were timed, the features "
        "of a frozen encoder included"
    )


def compare_speeds(one: BenchResults, other: BenchResults) -> Iterator[dict[str, Any]]:
    """Yield workload and phase, the rows a second of A and B by device, and the ratio of both.

    A number is None where it was not measured; the ratio is that of the fastest device of each.
    """
    sides = {"A": one, "B": other}
    grouped = {name: by_device(results.rows) for name, results in sides.items()}
    for key in dict.fromkeys((*grouped["A"], *grouped["B"])):
        rows = {name: grouped[name].get(key, {}) for name in sides}
        speeds = {
            f"{name}, {device}": _speed(rows[name].get(device))
            for name in sides
            for device in sides[name].machine.devices
        }
        fastest = {
            name: max(filter(None, map(_speed, rows[name].values())), default=None)
            for name in sides
        }
        ratio = _divide(fastest["B"], fastest["A"])
        yield {"workload": f"{key[0]}: {key[1]}", "phase": key[2], **speeds, "B ÷ A": ratio}


def compare(one: BenchResults, other: BenchResults) -> BenchTable:
    """Set the rows a second of A and B side by side."""
    sides = {"A": one, "B": other}
    columns = [f"{name}, {device}" for name in sides for device in sides[name].machine.devices]
    cells = []
    for row in compare_speeds(one, other):
        speeds = (_number(row[title]) for title in columns)
        cells.append((row["workload"], row["phase"], *speeds, _ratio(row["B ÷ A"])))
    remarks = ["the last column compares the fastest device of each"]
    remarks += [
        f"{name} is of a quick bench: few rows were timed, and not for long"
        for name, results in sides.items()
        if results.is_quick
    ]
    if (one.machine.cpu, one.machine.devices) == (other.machine.cpu, other.machine.devices):
        remarks += _repeatability(one, other)
    titles = ("workload", "phase", *columns, "B ÷ A")
    return BenchTable(title="Rows a second", columns=titles, rows=cells, remarks=tuple(remarks))


def _repeatability(one: BenchResults, other: BenchResults) -> Iterator[str]:
    """Say which medians of two runs on one machine differ, and whether their ranges do."""
    again = {row.place: row for row in other.rows if row.seconds}
    pairs = [(row, again[row.place]) for row in one.rows if row.seconds and row.place in again]
    apart = [
        pair
        for pair in pairs
        if not 1 / _STEADY <= (_divide(_speed(pair[1]), _speed(pair[0])) or 0.0) <= _STEADY
    ]
    yield (
        f"of {len(pairs)} timings on the same devices {len(pairs) - len(apart)} have medians "
        f"within {100 * (_STEADY - 1):.0f}% of each other"
    )
    for pair in apart:
        (low, high), (other_low, other_high) = (
            (row.timed_rows / max(row.seconds), row.timed_rows / min(row.seconds)) for row in pair
        )
        verb = "meet" if max(low, other_low) <= min(high, other_high) else "do not meet"
        yield (
            f"{', '.join(pair[0].place)}: {_number(low)}–{_number(high)} and "
            f"{_number(other_low)}–{_number(other_high)} rows/s, ranges that {verb}"
        )


def _speed(row: Row | None) -> float | None:
    return row.rows_per_second if row else None


def _divide(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _milliseconds(row: Row | None) -> str:
    if row is None or row.median_seconds is None:
        return _NOT_TIMED
    seconds = (row.median_seconds, min(row.seconds), max(row.seconds))
    median, lowest, highest = (_number(1e3 * one) for one in seconds)
    return f"{median} ({lowest}–{highest})" if len(row.seconds) > 1 else median


def _ratio(value: float | None) -> str:
    """Return a ratio with two digits or more."""
    if value is None:
        return _NOT_TIMED
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return _NOT_TIMED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
