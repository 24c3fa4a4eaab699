"""The results of a bench, or of two side by side, as tables of text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from finetune.bench.published import ARTICLE_TEXTS, ARTICLE_TOKENS, PUBLISHED
from finetune.bench.results import GROUPS, BenchResults, BenchTable, Row

CPU = "cpu"
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
    return _divide(_speed_of(side_by_side.get(device)), _speed_of(side_by_side.get(CPU)))


def _measured(group: str, rows: Sequence[Row]) -> BenchTable:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    columns: list[tuple[str, str, Callable[[Row | None], str]]] = []
    for device in devices:
        columns.append((device, f"{device}, ms a step", _milliseconds))
        columns.append((device, f"{device}, rows/s", lambda row: _number(_speed_of(row))))
    if group == "training":
        columns += [
            (device, f"{device}, min for {ARTICLE_TEXTS:,}", _minutes) for device in devices
        ]
    others = devices[1:] if CPU in devices else []
    cells = []
    for (_, workload, phase), side_by_side in by_device(rows).items():
        size = next(iter(side_by_side.values())).rows
        timings = [show(side_by_side.get(device)) for device, _, show in columns]
        speedups = [_ratio(speedup_of(side_by_side, device)) for device in others]
        cells.append((workload, phase, f"{size:,}", *timings, *speedups))
    titles = ["workload", "phase", "rows", *(title for _, title, _ in columns)]
    titles += [f"{device} ÷ {CPU}" for device in others]
    remarks = (*_notes(rows), *_findings(group, rows, others))
    return BenchTable(
        group=group, title=_TITLES[group], columns=tuple(titles), rows=cells, remarks=remarks
    )


def _notes(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        if row.note:
            timed = f"; {row.timed_rows:,} were timed" if row.timed_rows else ""
            yield f"{row.workload}, {row.phase}, {row.device}: {row.note}{timed}"


def _findings(group: str, rows: Sequence[Row], others: Iterable[str]) -> Iterator[str]:
    if group in ("mlp", "inference"):
        timed = by_device(rows).values()
        for device in others:
            if not any(speedup_of(one, device) for one in timed):
                continue
            first = first_faster(rows, device)
            where = f"from {first} on" if first else "at none of these"
            yield f"{device} is faster than the CPU {where}"
    if group == "training":
        yield from _article_ratios(rows)
        yield (
            f"minutes for one pass over {ARTICLE_TEXTS:,} rows are extrapolated from the rows a "
            "second; a step of finetune run is a pass over the rows that were timed, the features "
            "of a frozen encoder included"
        )


def _article_ratios(rows: Sequence[Row]) -> Iterator[str]:
    """Say how many times as fast ``finetune run`` is as each of the article's batch sizes."""
    speeds = {(row.device, row.workload): row.rows_per_second for row in rows}
    for (device, workload), theirs in speeds.items():
        mode, _, batch = workload.partition(f", {ARTICLE_TOKENS} tokens, ")
        times = _divide(speeds.get((device, f"{mode}, as finetune run")), theirs)
        if batch and times:
            yield (
                f"{device}, {mode}: finetune run is {times:.1f} times as fast as "
                f"{ARTICLE_TOKENS} tokens, {batch}"
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
            f"{name}, {device}": _speed_of(rows[name].get(device))
            for name in sides
            for device in sides[name].machine.devices
        }
        gain = _divide(_fastest(rows["B"]), _fastest(rows["A"]))
        yield {"workload": f"{key[0]}: {key[1]}", "phase": key[2], **speeds, "B ÷ A": gain}


def compare(one: BenchResults, other: BenchResults) -> BenchTable:
    """Set the rows a second of A and B side by side."""
    sides = {"A": one, "B": other}
    columns = [f"{name}, {device}" for name in sides for device in sides[name].machine.devices]
    cells = []
    for row in compare_speeds(one, other):
        speeds = (_number(row[title]) for title in columns)
        cells.append((row["workload"], row["phase"], *speeds, _ratio(row["B ÷ A"])))
    titles = ("workload", "phase", *columns, "B ÷ A")
    remarks = ["the last column compares the fastest device of each"]
    remarks += [
        f"{name} is of a quick bench: few rows were timed, and not for long"
        for name, results in sides.items()
        if results.is_quick
    ]
    if (one.machine.cpu, one.machine.devices) == (other.machine.cpu, other.machine.devices):
        remarks += _repeatability(one, other)
    return BenchTable(title="Rows a second", columns=titles, rows=cells, remarks=tuple(remarks))


def _fastest(side_by_side: Mapping[str, Row]) -> float | None:
    return max(filter(None, map(_speed_of, side_by_side.values())), default=None)


def _repeatability(one: BenchResults, other: BenchResults) -> Iterator[str]:
    """Say which medians of two runs on one machine differ, and whether their ranges do."""
    again = {row.place: row for row in other.rows if row.seconds}
    pairs = [(row, again[row.place]) for row in one.rows if row.seconds and row.place in again]
    apart = [pair for pair in pairs if not 1 / _STEADY <= _gain(*pair) <= _STEADY]
    yield (
        f"of {len(pairs)} timings on the same devices {len(pairs) - len(apart)} have medians "
        f"within {100 * (_STEADY - 1):.0f}% of each other"
    )
    for pair in apart:
        (low, high), (other_low, other_high) = map(_range, pair)
        verb = "meet" if max(low, other_low) <= min(high, other_high) else "do not meet"
        yield (
            f"{', '.join(pair[0].place)}: {_number(low)}–{_number(high)} and "
            f"{_number(other_low)}–{_number(other_high)} rows/s, ranges that {verb}"
        )


def _gain(row: Row, again: Row) -> float:
    return (again.rows_per_second or 0.0) / (row.rows_per_second or 1.0)


def _range(row: Row) -> tuple[float, float]:
    return row.timed_rows / max(row.seconds), row.timed_rows / min(row.seconds)


def _speed_of(row: Row | None) -> float | None:
    """Return the rows a second, None where nothing was timed."""
    return row.rows_per_second if row else None


def _divide(one: float | None, other: float | None) -> float | None:
    """Return a ratio, None where a number is not known."""
    return None if one is None or other is None else one / other


def _milliseconds(row: Row | None) -> str:
    if row is None or row.median_seconds is None:
        return _NOT_TIMED
    seconds = (row.median_seconds, min(row.seconds), max(row.seconds))
    median, lowest, highest = (_number(1e3 * one) for one in seconds)
    return f"{median} ({lowest}–{highest})" if len(row.seconds) > 1 else median


def _minutes(row: Row | None) -> str:
    speed = _speed_of(row)
    return f"{ARTICLE_TEXTS / speed / 60:.2f}" if speed else _NOT_TIMED


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
