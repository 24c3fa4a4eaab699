"""The results as tables of text, for the terminal and the page."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from finetune.bench.published import ARTICLE_TEXTS, ARTICLE_TOKENS, PUBLISHED
from finetune.bench.results import GROUPS, BenchResults, BenchTable, Row

CPU = "cpu"
NOT_TIMED = "-"
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
    return divide(speed_of(side_by_side.get(device)), speed_of(side_by_side.get(CPU)))


def _measured(group: str, rows: Sequence[Row]) -> BenchTable:
    devices = sorted(dict.fromkeys(row.device for row in rows), key=lambda name: name != CPU)
    columns: list[tuple[str, str, Callable[[Row | None], str]]] = []
    for device in devices:
        columns.append((device, f"{device}, ms a step", _milliseconds))
        columns.append((device, f"{device}, rows/s", lambda row: number(speed_of(row))))
    if group == "training":
        columns += [
            (device, f"{device}, min for {ARTICLE_TEXTS:,}", _minutes) for device in devices
        ]
    others = devices[1:] if CPU in devices else []
    cells = []
    for (_, workload, phase), side_by_side in by_device(rows).items():
        size = next(iter(side_by_side.values())).rows
        timings = [show(side_by_side.get(device)) for device, _, show in columns]
        speedups = [ratio(speedup_of(side_by_side, device)) for device in others]
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
        times = divide(speeds.get((device, f"{mode}, as finetune run")), theirs)
        if batch and times:
            yield (
                f"{device}, {mode}: finetune run is {times:.1f} times as fast as "
                f"{ARTICLE_TOKENS} tokens, {batch}"
            )


def speed_of(row: Row | None) -> float | None:
    """Return the rows a second, None where nothing was timed."""
    return row.rows_per_second if row else None


def divide(one: float | None, other: float | None) -> float | None:
    """Return a ratio, None where a number is not known."""
    return None if one is None or other is None else one / other


def _milliseconds(row: Row | None) -> str:
    if row is None or row.median_seconds is None:
        return NOT_TIMED
    seconds = (row.median_seconds, min(row.seconds), max(row.seconds))
    median, lowest, highest = (number(1e3 * one) for one in seconds)
    return f"{median} ({lowest}–{highest})" if len(row.seconds) > 1 else median


def _minutes(row: Row | None) -> str:
    speed = speed_of(row)
    return f"{ARTICLE_TEXTS / speed / 60:.2f}" if speed else NOT_TIMED


def ratio(value: float | None) -> str:
    """Return a ratio with two digits or more."""
    if value is None:
        return NOT_TIMED
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def number(value: float | None) -> str:
    """Return a number with three digits or more."""
    if value is None:
        return NOT_TIMED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
