"""The results as tables of text, for the terminal and the page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from finetune.bench.groups import GROUPS
from finetune.bench.published import (
    APPLE_SOURCE,
    ARTICLE_INFERENCE,
    ARTICLE_INFERENCE_SOURCE,
    ARTICLE_ROWS,
    ARTICLE_SOURCE,
)
from finetune.bench.results import BenchResults, Row
from finetune.bench.training import ARTICLE_TOKENS, TEXTS

CPU = "cpu"
_TITLES = {
    "mlp": "A network of three layers, forward and backward",
    "inference": "BERT-base on questions, by batch size",
    "training": "BERT-base on 1,000 questions: as the article trained it, and as finetune run does",
    "apple": "Three networks of Apple's chart",
    "own": "Your own",
}
_NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table of text; all columns but the first two are numbers.

    Args:
        group: That it is of.
        remarks: Sentences below it.
        source: Who published its numbers; empty where they were measured.
    """

    group: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    source: str = ""


def tabulate(results: BenchResults) -> list[Table]:
    """Return a table of each group that has rows, and after it what was published."""
    tables = []
    for group in (*GROUPS, "own"):
        if rows := results.of(group):
            tables += [_measured(group, rows), *_published(group)]
    return tables


def compare(one: BenchResults, other: BenchResults, *, names: tuple[str, str]) -> Table:
    """Set the rows a second of two machines side by side; ``names`` are those of the machines."""
    sides = [(name, device, results) for name, results in zip(names, (one, other), strict=True)
             for device in results.machine.devices]  # fmt: skip
    cells = []
    for key in dict.fromkeys(map(_key, (*one.rows, *other.rows))):
        group, workload, phase = key
        speeds = [_speed(results, key, device) for _, device, results in sides]
        best = {name: 0.0 for name in names}
        for (name, _, _), speed in zip(sides, speeds, strict=True):
            best[name] = max(best[name], speed or 0.0)
        ratio = best[names[1]] / best[names[0]] if all(best.values()) else None
        cells.append((f"{group}: {workload}", phase, *map(_number, speeds), _ratio(ratio)))
    columns = ("workload", "phase", *(f"{name}, {device}" for name, device, _ in sides))
    remarks = ["the last column compares the fastest device of each machine"]
    remarks += [
        f"{name} is of a quick bench: few rows were timed, and not for long"
        for name, results in zip(names, (one, other), strict=True)
        if results.is_quick
    ]
    ratio_column = f"{names[1]} ÷ {names[0]}"
    return Table("", "Rows a second", (*columns, ratio_column), tuple(cells), tuple(remarks))


def first_faster(rows: Sequence[Row], device: str) -> str | None:
    """Return the workload from which on a device is faster than the CPU; None if never.

    The rows of a group go from small workloads to large ones.
    """
    first = None
    for _, by_device in group_rows(rows):
        speedup = speedup_of(by_device, device)
        is_faster = speedup is not None and speedup > 1
        first = (first or by_device[device].workload) if is_faster else None
    return first


def speedup_of(by_device: Mapping[str, Row], device: str) -> float | None:
    """Return the rows a second of a device over the CPU's in the same run, None if not known."""
    if device not in by_device or CPU not in by_device:
        return None
    speed, slow = by_device[device].rows_per_second, by_device[CPU].rows_per_second
    return None if speed is None or slow is None else speed / slow


def _measured(group: str, rows: Sequence[Row]) -> Table:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    others = [device for device in devices if device != CPU] if CPU in devices else []
    columns = ["workload", "phase", "rows"]
    for device in devices:
        columns += [f"{device}, ms a step", f"{device}, rows/s"]
    if group == "training":
        columns += [f"{device}, min for {TEXTS:,}" for device in devices]
    columns += [f"{device} ÷ {CPU}" for device in others]
    cells = []
    for (_, workload, phase), by_device in group_rows(rows):
        some = next(iter(by_device.values()))
        line = [workload, phase, f"{some.rows:,}"]
        for device in devices:
            line += _timing(by_device.get(device))
        if group == "training":
            line += [_minutes(by_device.get(device)) for device in devices]
        line += [_ratio(speedup_of(by_device, device)) for device in others]
        cells.append(tuple(line))
    return Table(group, _TITLES[group], tuple(columns), tuple(cells), tuple(_remarks(group, rows)))


def _remarks(group: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.note:
            timed = f"; {row.timed_rows:,} were timed" if row.timed_rows else ""
            yield f"{row.workload}, {row.phase}, {row.device}: {row.note}{timed}"
    devices = dict.fromkeys(row.device for row in rows)
    if group in ("mlp", "inference") and CPU in devices:
        for device in devices:
            if device != CPU:
                first = first_faster(rows, device)
                where = f"from {first} on" if first else "at none of these"
                yield f"{device} is faster than the CPU {where}"
    if group == "training":
        yield from _article_ratios(rows)
        yield (
            f"minutes for one pass over {TEXTS:,} rows are extrapolated from the rows a second; a "
            "step of finetune run is a pass over the rows that were timed, the features of a "
            "frozen encoder included"
        )


def _article_ratios(rows: Sequence[Row]) -> Iterator[str]:
    """Say how many times as fast ``finetune run`` is as each of the article's batch sizes."""
    speeds = {(row.device, row.workload): row.rows_per_second for row in rows}
    for (device, workload), theirs in speeds.items():
        mode, _, batch = workload.partition(f", {ARTICLE_TOKENS} tokens, ")
        ours = speeds.get((device, f"{mode}, as finetune run"))
        if batch and ours and theirs:
            yield (
                f"{device}, {mode}: finetune run is {ours / theirs:.1f} times as fast as "
                f"{ARTICLE_TOKENS} tokens, {batch}"
            )


def _published(group: str) -> Iterator[Table]:
    if group == "training":
        rows = tuple(
            (one.mode, one.device, str(one.batch_size), f"{one.rows_per_second}", one.duration)
            for one in ARTICLE_ROWS
        )
        columns = ("mode", "device", "batch", "rows/s", f"{TEXTS:,} rows")
        yield Table(group, "The article's", columns, rows, source=ARTICLE_SOURCE)
    if group == "inference":
        cells = tuple(
            (f"batch {batch}", "evaluation", *(f"{1e3 * one:,.0f}" for one in seconds))
            for batch, seconds in ARTICLE_INFERENCE.items()
        )
        titles = ("workload", "phase", "CPU, ms a step", "MPS, ms a step")
        yield Table(group, "The article's", titles, cells, source=ARTICLE_INFERENCE_SOURCE)
    if group == "apple":
        yield Table(group, "Apple's", (), (), source=APPLE_SOURCE)


def group_rows(rows: Iterable[Row]) -> list[tuple[tuple[str, str, str], dict[str, Row]]]:
    """Return the rows by device for each group, workload and phase, in order."""
    grouped: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(_key(row), {})[row.device] = row
    return list(grouped.items())


def _key(row: Row) -> tuple[str, str, str]:
    return row.group, row.workload, row.phase


def _speed(results: BenchResults, key: tuple[str, str, str], device: str) -> float | None:
    found = (row for row in results.rows if (_key(row), row.device) == (key, device))
    return next((row.rows_per_second for row in found), None)


def _timing(row: Row | None) -> tuple[str, str]:
    if row is None or row.median_seconds is None:
        return _NONE, _NONE
    median, lowest, highest = (
        _number(1e3 * one) for one in (row.median_seconds, min(row.seconds), max(row.seconds))
    )
    spread = f" ({lowest}–{highest})" if len(row.seconds) > 1 else ""
    return median + spread, _number(row.rows_per_second)


def _minutes(row: Row | None) -> str:
    speed = row and row.rows_per_second
    return f"{TEXTS / speed / 60:.2f}" if speed else _NONE


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return _NONE
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
