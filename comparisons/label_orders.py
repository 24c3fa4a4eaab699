"""Labels TREC over HTTP in the order of ``finetune label``, and compares it with a random order.

    python comparisons/label_orders.py train_5500.label --orders 0 1 2 --out orders.jsonl
    python comparisons/label_orders.py --summarize orders.jsonl

Each order has 2,000 other questions without labels. The true class of each text that the server
shows is posted to it. Both sides train on their first labels and are tested on the same 1,500
questions: a linear head on the frozen encoder, and ``finetune run`` as it is. If a class has no
label, its test questions are misclassified.
"""

import argparse
import csv
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from few_labels import HELD_OUT, POOL, WORDS, Question, as_table, read_questions
from scipy import stats
from web_load import Client, server

import finetune


def count_until(labels: Sequence[str], *, each: int = 5) -> int | None:
    """Return the number of labels after which every class has ``each``; None if one never has."""
    counts: Counter[str] = Counter()
    for number, label in enumerate(labels, 1):
        counts[label] += 1
        if len(counts) == len(WORDS) and min(counts.values()) >= each:
            return number
    return None


def label_over_http(
    pool: Sequence[Question], folder: Path, options: argparse.Namespace
) -> list[Question]:
    """Return the labeled questions in the order in which the server showed them."""
    path = folder / "texts.txt"
    path.write_text("\n".join(text for text, _ in pool) + "\n")
    classes = ",".join(sorted(WORDS.values()))
    arguments = ("label", path, "--model", options.model, "--classes", classes, "--no-browser")
    labeled: list[Question] = []
    with server(*arguments) as (_, address):
        client = Client(address)
        while client.ask("GET", "/api/status")[1]["features"] < 1:
            time.sleep(0.5)
        while len(labeled) < max(options.labels):
            _, shown = client.ask("GET", "/api/next")
            text, label = pool[shown["row"] - 1]
            assert text == shown["text"]
            client.ask("POST", "/api/label", {"row": shown["row"], "label": label})
            labeled.append((text, label))
            time.sleep(options.pause)
    with (folder / "texts.labels.csv").open(newline="") as file:
        written = [row["label"] for row in csv.DictReader(file)]
    assert Counter(written) == Counter(label for _, label in labeled)
    return labeled


def test(
    rows: Sequence[Question],
    held_out: Sequence[Question],
    folder: Path,
    options: argparse.Namespace,
    **changes: Any,
) -> dict[str, float]:
    """Train on all rows, and return accuracy and macro F1 in percent over all test questions."""
    classes = {label for _, label in rows}
    known = [question for question in held_out if question[1] in classes]
    finetune.run(
        data=as_table([*rows]), test_file=as_table(known), model=options.model, progress=False,
        device=options.device, output_dir=str(folder), feature_cache=False, **changes,
    )  # fmt: skip
    texts, labels = zip(*held_out, strict=True)
    predicted = [prediction.label for prediction in finetune.load(folder).predict([*texts])]
    rows_of, as_class = Counter(labels), Counter(predicted)
    correct = Counter(
        label for label, other in zip(labels, predicted, strict=True) if label == other
    )
    scores = [200 * correct[name] / (rows_of[name] + as_class[name]) for name in rows_of]
    return {"accuracy": 100 * correct.total() / len(held_out), "macro_f1": statistics.mean(scores)}


def measure(options: argparse.Namespace) -> None:
    """Label and train in all orders, and append what was measured to a file."""
    questions = [(text, WORDS[label]) for text, label in read_questions(options.file)]
    held_out, rest = questions[:HELD_OUT], questions[HELD_OUT:]
    for number in options.orders:
        pool = random.Random(number).sample(rest, POOL)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            labeled = label_over_http(pool, folder, options)
            record: dict[str, Any] = {"order": number}
            for side, rows in (("label", labeled), ("random", pool)):
                record[f"{side}: labels until five"] = count_until([label for _, label in rows])
                for count in options.labels:
                    head = test(rows[:count], held_out, folder / f"head-{side}-{count}", options,
                                freeze_core=True)  # fmt: skip
                    record[f"{side}: macro F1 of a linear head, {count}"] = head["macro_f1"]
                whole = test(rows[:count], held_out, folder / f"run-{side}", options, seed=number)
                record[f"{side}: accuracy of run, {count}"] = whole["accuracy"]
                record[f"{side}: macro F1 of run, {count}"] = whole["macro_f1"]
        print(json.dumps(record), flush=True)
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")


def summarize(files: list[Path]) -> None:
    """Print the mean of each figure on both sides, and the paired gain with its 95% interval."""
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for name in records[0]:
        if name.startswith("label: "):
            figure = name.removeprefix("label: ")
            pairs = [(record[name], record[f"random: {figure}"]) for record in records]
            values = [(ours, base) for ours, base in pairs if None not in (ours, base)]
            gains = [ours - base for ours, base in values]
            margin = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
            ours, base = (statistics.mean(column) for column in zip(*values, strict=True))
            most = max(ours for ours, _ in values)
            gain = f"{statistics.mean(gains):+.1f} ± {margin:.1f}, {len(gains)} orders"
            print(f"{figure}: {ours:.1f} (at most {most:.1f}), random order {base:.1f}, {gain}")


def main() -> None:
    """Measure, or summarize what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--orders", type=int, nargs="+", default=[*range(10)])
    parser.add_argument("--labels", type=int, nargs="+", default=[60, 120])
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two labels")
    parser.add_argument("--out", type=Path, default=Path("label_orders.jsonl"))
    parser.add_argument("--summarize", type=Path, nargs="+")
    options = parser.parse_args()
    summarize(options.summarize) if options.summarize else measure(options)


if __name__ == "__main__":
    main()
