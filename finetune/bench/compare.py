"""Two benches side by side, of two machines or of two runs on one."""

from collections.abc import Iterator, Mapping

from finetune.bench.results import BenchResults, BenchTable, Row
from finetune.bench.tables import by_device, divide, number, ratio, speed_of

# Medians that differ by more say that something else was at work.
_STEADY = 1.1


def compare(one: BenchResults, other: BenchResults) -> BenchTable:
    """Set the rows a second of A and B side by side."""
    sides = {"A": one, "B": other}
    grouped = {name: by_device(results.rows) for name, results in sides.items()}
    keys = dict.fromkeys((*grouped["A"], *grouped["B"]))
    columns = [(name, device) for name in sides for device in sides[name].machine.devices]
    cells = []
    for key in keys:
        speeds = [speed_of(grouped[name].get(key, {}).get(device)) for name, device in columns]
        gain = divide(_fastest(grouped["B"].get(key, {})), _fastest(grouped["A"].get(key, {})))
        cells.append((f"{key[0]}: {key[1]}", key[2], *map(number, speeds), ratio(gain)))
    titles = ("workload", "phase", *(f"{name}, {device}" for name, device in columns), "B ÷ A")
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
    return max(filter(None, map(speed_of, side_by_side.values())), default=None)


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
            f"{', '.join(pair[0].place)}: {number(low)}–{number(high)} and "
            f"{number(other_low)}–{number(other_high)} rows/s, ranges that {verb}"
        )


def _gain(row: Row, again: Row) -> float:
    return (again.rows_per_second or 0.0) / (row.rows_per_second or 1.0)


def _range(row: Row) -> tuple[float, float]:
    return row.timed_rows / max(row.seconds), row.timed_rows / min(row.seconds)
