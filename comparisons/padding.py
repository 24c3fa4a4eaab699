"""Share of the tokens of TREC's training batches that are not padding, by each device's rules.

    python comparisons/padding.py --data-dir FOLDER

FOLDER holds train_5500.label, of which a run with defaults trains on 4,362 rows. Nothing runs on a
device. The extra ``offline`` brings the tokenizer. The last line is JSON.
"""

import argparse
import json
import statistics
from dataclasses import replace

from finetune.config.load import load_config
from finetune.devices.base import BatchShapes
from finetune.devices.cuda import CapturedShapes
from finetune.devices.mps.device import FewShapes
from finetune.events import ignore
from finetune.runs.preparation import Preparation, prepare

RULES = {"cpu": BatchShapes(), "cuda": CapturedShapes(), "mps": FewShapes()}
SEEDS = range(5)


def real_token_share(preparation: Preparation, shapes: BatchShapes) -> float:
    """Return the mean over some seeds of the order, and print the padded lengths."""
    device = preparation.device
    device.shapes = shapes
    plan = preparation.plan
    share = statistics.mean(replace(plan, seed=seed).real_token_share() for seed in SEEDS)
    lengths = ", ".join(map(str, plan.padded_lengths))
    print(f"{len(plan.padded_lengths)} padded lengths, {share:.1%} real tokens: {lengths}")
    return share


def main() -> None:
    """Print a line a device."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    flags = {"data": "trec", "model": "minilm", "device": "cpu", **vars(parser.parse_args())}
    config = load_config(file=None, environment={}, flags=flags, assignments=()).config
    preparation = prepare(config, emit=ignore)
    shares = {}
    for name, shapes in RULES.items():
        print(f"{name}: ", end="")
        shares[name] = real_token_share(preparation, shapes)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
