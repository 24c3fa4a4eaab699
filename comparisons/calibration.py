"""What temperature scaling does to probabilities, and what abstaining gives, on TREC's test rows.

    python comparisons/calibration.py --data-dir FOLDER --model minilm --device cpu --seeds 5

For each seed, which draws the validation split too, on the test split: calibration error (ECE) in
percent, loss and accuracy before and after, and how many answers differ; then coverage and
precision with --target-precision, the last with its 95 % interval over all seeds. The ECE of 545
rows is about 2 % even where probabilities are right, so the summary also has that of all seeds'
rows together. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import finetune
from finetune.evaluation.calibration import BeforeAndAfter, CalibrationScores
from finetune.events import ignore
from finetune.files import read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.trained import TrainedModel
from finetune.tasks.intervals import wilson_interval
from finetune.tasks.single import Single


def run_once(
    options: dict[str, Any], *, precision: float
) -> tuple[dict[str, float], BeforeAndAfter]:
    """Train once; return what was found on the test split."""
    with tempfile.TemporaryDirectory() as parent:
        folder = RunFolder(Path(parent, "run"))
        results = finetune.run(**options, output_dir=folder.path)
        assert results.calibration, "too few validation rows, or too few wrong answers"
        rows = read_jsonl(folder.predictions_file)
        texts, labels = ([row[name] for row in rows] for name in ("text", "label"))
        device = options["device"]
        before = answers_before(folder, texts, device=device)
        answers = finetune.predict(
            folder.path, texts, device=device, target_precision=precision, emit=print
        )
    found, after = results.calibration.test, [row["predicted"] for row in rows]
    given = [(one.result["label"], label) for one, label in zip(answers, labels, strict=True)]
    answered = [one == label for one, label in given if one is not None]
    return {
        "temperature": results.calibration.temperature,
        "ece_before": 100 * found.before.reliability.ece,
        "ece_after": 100 * found.after.reliability.ece,
        "loss_before": found.before.loss,
        "loss_after": found.after.loss,
        "accuracy_before": share_of_equal(before, labels),
        "accuracy_after": share_of_equal(after, labels),
        "changed_answers": sum(one != other for one, other in zip(before, after, strict=True)),
        "rows": len(rows),
        "answered": len(answered),
        "right": sum(answered),
    }, found


def answers_before(folder: RunFolder, texts: list[str], *, device: str) -> list[str]:
    """Return the answers of a run's model with its last layer as it was before calibration."""
    model = TrainedModel.load(folder, device=device, emit=ignore)
    task = model.classifier.task
    Single(task.class_names).unfold(model.classifier.output_parameters, saved=task.parameters)
    return [answer.result["label"] for answer in model.answer(texts)]


def share_of_equal(answers: list[str], labels: list[str]) -> float:
    """Return the accuracy in percent."""
    return 100 * statistics.mean(one == label for one, label in zip(answers, labels, strict=True))


def pool(found: list[CalibrationScores]) -> float:
    """Return the ECE of all rows together, in percent."""
    gaps: dict[float, float] = defaultdict(float)
    rows = 0
    for one in (one for scores in found for one in scores.reliability.bins):
        gaps[one.lower] += one.count * (one.confidence - one.accuracy)
        rows += one.count
    return 100 * sum(map(abs, gaps.values())) / rows


def summarize(
    found: list[dict[str, float]], splits: list[BeforeAndAfter], *, precision: float
) -> dict[str, Any]:
    """Return the means of all seeds, and ECE and precision over all their rows."""
    means = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    rows, answered, right = (sum(one[name] for one in found) for name in
                             ("rows", "answered", "right"))  # fmt: skip
    interval = wilson_interval(right, answered, errors=1.96) if answered else ()
    return {
        **{name: round(mean, 4) for name, mean in means.items()},
        "ece_ratio": round(means["ece_after"] / means["ece_before"], 3),
        "pooled_ece_before": round(pool([one.before for one in splits]), 4),
        "pooled_ece_after": round(pool([one.after for one in splits]), 4),
        "target_precision": precision,
        "coverage": round(answered / rows, 4),
        "precision": round(right / answered, 4) if answered else None,
        "precision_interval": [round(float(limit), 4) for limit in interval],
    }


def main() -> None:
    """Train each seed, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", help="folder of train_5500.label")
    parser.add_argument("--data", default="trec")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target-precision", type=float, default=0.95)
    parser.add_argument("--freeze-core", action="store_true")
    parser.add_argument("--num-train-epochs", type=float)
    parser.add_argument("--max-train-samples", type=int)
    arguments = vars(parser.parse_args())
    seeds, precision = arguments.pop("seeds"), arguments.pop("target_precision")
    options = {name: value for name, value in arguments.items() if value is not None}
    found, splits = [], []
    for seed in range(seeds):
        own, split = run_once({**options, "seed": seed, "split_seed": seed}, precision=precision)
        found.append(own)
        splits.append(split)
        print(seed, json.dumps(own), flush=True)
    print(json.dumps(summarize(found, splits, precision=precision)))


if __name__ == "__main__":
    main()
