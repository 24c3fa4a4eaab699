"""What checkpoints cost a run at the default frequency.

Fine-tunes on TREC once, and counts what the thread that trains and the one that writes do for
checkpoints.

    python comparisons/checkpoint_cost.py --data-dir FOLDER --model minilm

The last line is JSON: seconds in which steps wait, CPU seconds, and their shares of the run.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetune
from finetune.devices.host import keep_freed_memory
from finetune.runs.saving import Checkpoints

IN_TRAINING = ("save_best", "save", "__exit__")
IN_THREAD = "_write_all"


class Cost:
    """Counts the seconds of calls."""

    def __init__(self) -> None:
        self.wall_seconds = self.cpu_seconds = 0.0

    def count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are counted."""

        def call(*arguments: Any, **options: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.wall_seconds += time.perf_counter() - began
                self.cpu_seconds += time.thread_time() - cpu_began

        return call


def measure(**options: Any) -> dict[str, float]:
    """Make a run and return what its checkpoints took, in seconds and as shares of the run."""
    training, writing = Cost(), Cost()
    for name in IN_TRAINING:
        setattr(Checkpoints, name, training.count(getattr(Checkpoints, name)))
    setattr(Checkpoints, IN_THREAD, writing.count(getattr(Checkpoints, IN_THREAD)))
    began, cpu_began = time.perf_counter(), time.process_time()
    finetune.run(**options)
    run_seconds, run_cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    cpu_seconds = training.cpu_seconds + writing.cpu_seconds
    return {
        "run_seconds": run_seconds,
        "run_cpu_seconds": run_cpu_seconds,
        "waiting_seconds": training.wall_seconds,
        "checkpoint_cpu_seconds": cpu_seconds,
        "waiting_share": training.wall_seconds / run_seconds,
        "cpu_share": cpu_seconds / run_cpu_seconds,
    }


def main() -> None:
    """Parse the command line and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="the folder with TREC")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="of the training split; all by default")
    parser.add_argument("--epochs", type=float, help="as the run chooses by default")
    given = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = measure(
            data="trec", data_dir=given.data_dir, model=given.model, device=given.device,
            max_train_samples=given.rows, num_train_epochs=given.epochs, output_dir=f"{folder}/run",
        )  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
