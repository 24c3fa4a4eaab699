"""What each mode costs and gives: test accuracy and seconds of training, from an empty store.

For each seed another tenth of train_5500 is held out as test split.

    python comparisons/modes.py --data-dir FOLDER --model minilm --device cpu --seeds 5

The last line is JSON.
"""

import json
import statistics
import tempfile
from typing import Any

from shared import trec_options, trec_parser

import finetune

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "last-2": {"train_layers": 2},
    "last-1": {"train_layers": 1},
    "head": {"freeze_core": True},
    "classifier": {"head": "classifier"},
}


def run_once(options: dict[str, Any]) -> tuple[float, float]:
    """Return test accuracy and seconds of a run whose tensor store was empty."""
    with tempfile.TemporaryDirectory() as folder:
        results = finetune.run(**options, output_dir=f"{folder}/run", cache_dir=f"{folder}/cache")
    return results.test.accuracy, results.training.train_runtime


def main() -> None:
    """Run each mode with each seed."""
    parser = trec_parser(__doc__)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    arguments = parser.parse_args()
    shared = trec_options(arguments)
    metrics = {}
    for mode in arguments.modes:
        pairs = [
            run_once({**shared, **MODES[mode], "seed": seed, "split_seed": seed})
            for seed in range(arguments.seeds)
        ]
        accuracies, seconds = zip(*pairs, strict=True)
        metrics[mode] = {
            "accuracy": statistics.mean(accuracies),
            "lowest": min(accuracies),
            "highest": max(accuracies),
            "seconds": statistics.median(seconds),
        }
        print(mode, metrics[mode], flush=True)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
