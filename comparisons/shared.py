"""What several measurements share: options and rows of TREC, processes that are timed, a bound."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """What a process took, from its start to its end."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure_process(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Run Python with these arguments, in a folder and with variables added to the environment.

    What it wrote is shown only if it fails, which ends this process too.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(arguments)} failed:\n{output.read()[-4000:]}")
    unit = 1 if sys.platform == "darwin" else 2**10
    return Measured(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * unit)


def lower_95(differences: Sequence[float]) -> float | None:
    """Return the lower 95 % bound of the mean of paired differences, by Student's t."""
    from scipy import stats

    if len(differences) < 2:
        return None
    margin = stats.t.ppf(0.95, len(differences) - 1) * stats.sem(differences)
    return float(statistics.mean(differences) - margin)


def trec_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options for trainings on TREC with several seeds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-dir", required=True, help="the folder of train_5500.label")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder with a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    return parser


def trec_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run on TREC that ``trec_parser`` has read."""
    return {
        "data": "trec",
        "data_dir": given.data_dir,
        "model": given.model,
        "device": given.device,
        "precision": "fp32",
    }


def read_questions(folder: str) -> list[tuple[str, str]]:
    """Return the text and the fine class, such as ``HUM:ind``, of each row of train_5500.label."""
    lines = Path(folder, "train_5500.label").read_text("iso-8859-1").splitlines()
    return [(text, fine) for fine, _, text in (line.partition(" ") for line in lines)]
