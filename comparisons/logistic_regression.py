"""Test accuracy of heads over a frozen core, and of logistic regression on the same numbers.

On TREC. For each seed another tenth of train_5500 is held out as test split. The regression
is scikit-learn's, with and without standardised features, its strength chosen on validation.

    python comparisons/logistic_regression.py --data-dir FOLDER --seeds 5

The last line is JSON.
"""

import json
import statistics
import tempfile
import warnings
from typing import Any

import numpy as np
from shared import lower_95, trec_options, trec_parser
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import finetune
from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.devices.batch_size import BatchSize
from finetune.events import ignore
from finetune.runs.features import stored_features
from finetune.runs.preparation import prepare

STRENGTHS = (0.01, 0.1, 1, 10, 100, 1000)
MODES: dict[str, dict[str, Any]] = {
    "head": {"freeze_core": True},
    "classifier": {"head": "classifier"},
}


def read_features(config: Config) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what the head reads of each split, float32 of shape [rows, hidden], and classes."""
    preparation = prepare(config, emit=ignore)
    batch_size = BatchSize(
        config.training.eval_batch_size, "batch size", preparation.device, ignore
    )
    _, examples = stored_features(preparation, batch_size, emit=ignore)
    return {
        split: (
            one.inputs_of(np.arange(len(one.labels)), 1)["inputs_embeds"][:, 0].numpy(),
            one.labels,
        )
        for split, one in examples.items()
    }


def best_regression(features: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the test accuracy of the regression that is best on validation."""
    scores = []
    for scaler in (None, StandardScaler().fit(features["train"][0])):
        splits = {
            split: (rows if scaler is None else scaler.transform(rows), labels)
            for split, (rows, labels) in features.items()
        }
        for strength in STRENGTHS:
            model = LogisticRegression(C=strength, max_iter=1000).fit(*splits["train"])
            scores.append((model.score(*splits["validation"]), model.score(*splits["test"])))
    return float(max(scores, key=lambda score: score[0])[1])


def compare(options: dict[str, Any], folder: str) -> tuple[float, float]:
    """Return the test accuracies of our head and of the regression."""
    ours = finetune.run(**options, output_dir=f"{folder}/run", overwrite=True)
    config = load_config(file=None, environment={}, flags=options, assignments=()).config
    return ours.test.accuracy, best_regression(read_features(config))


def main() -> None:
    """Compare over the seeds, for both kinds of head."""
    arguments = trec_parser(__doc__).parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    metrics = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode, options in MODES.items():
            pairs = []
            for seed in range(arguments.seeds):
                seeds = {"seed": seed, "split_seed": seed}
                pairs.append(compare({**trec_options(arguments), **options, **seeds}, folder))
                print(f"{mode}, seed {seed}: ours and regression {pairs[-1]}", flush=True)
            metrics[mode] = {
                "ours": statistics.mean(ours for ours, _ in pairs),
                "regression": statistics.mean(theirs for _, theirs in pairs),
                "lower_bound_of_difference": lower_95([ours - theirs for ours, theirs in pairs]),
            }
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
