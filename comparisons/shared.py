"""Helpers for several measurements: processes that are timed, and a bound."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple


class Measured(NamedTuple):
    """Time and peak memory of a process, from its start to its end."""

    wall_seconds: float
    peak_bytes: int


def measure_process(arguments: Sequence[str]) -> Measured:
    """Run Python with these arguments. If it fails, print the end of its output and exit."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(arguments)} failed:\n{output.read()[-4000:]}")
    unit = 1 if sys.platform == "darwin" else 2**10
    return Measured(seconds, used.ru_maxrss * unit)


def lower_95(differences: Sequence[float]) -> float | None:
    """Return the lower 95% bound of the mean of paired differences, by Student's t."""
    from scipy import stats

    if len(differences) < 2:
        return None
    margin = stats.t.ppf(0.95, len(differences) - 1) * stats.sem(differences)
    return float(statistics.mean(differences) - margin)
