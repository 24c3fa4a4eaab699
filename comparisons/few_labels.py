"""Measures few-label training on TREC: rows per class, unlabeled texts, names of classes.

    python comparisons/few_labels.py train_5500.label --out results.jsonl --device cuda
    python comparisons/few_labels.py --summarize results.jsonl

Each draw has other rows of each class and 2,000 other questions as unlabeled texts. All are tested
on the same 1,500 questions, which are in no draw. Variants of one draw have the same rows and seed.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from scipy import stats

import finetune

HELD_OUT, POOL = 1_500, 2_000
DESCRIPTIONS = {
    "HUM": "a person, who",
    "LOC": "a place, where",
    "NUM": "a number, how many",
    "ENTY": "a thing, what",
    "DESC": "a description, why",
    "ABBR": "an abbreviation, stands for",
}
WORDS = {
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
    "ENTY": "entity",
    "DESC": "description",
    "ABBR": "abbreviation",
}
# Options of each variant; POOL stands for the unlabeled texts of the draw.
VARIANTS: dict[str, dict[str, Any]] = {
    "earlier version": {},
    "neither": {"class_names": "off"},
    "codes as names": {},
    "names": {"class_descriptions": WORDS},
    "descriptions": {"class_descriptions": DESCRIPTIONS},
    "texts": {"class_names": "off", "unlabeled": POOL},
    "names and texts": {"class_descriptions": WORDS, "unlabeled": POOL},
    "descriptions and texts": {"class_descriptions": DESCRIPTIONS, "unlabeled": POOL},
    "fine-tuning": {"contrastive": "off"},
    "few-shot": {"contrastive": "on", "class_names": "off"},
    "few-shot and texts": {"contrastive": "on", "class_names": "off", "unlabeled": POOL},
}

Question = tuple[str, str]


def read_questions(file: Path, *, is_fine: bool = False) -> list[Question]:
    """Return the distinct questions with their coarse or fine class, in random order."""
    lines = (line.split(" ", 1) for line in file.read_text("latin-1").splitlines())
    questions = {
        text.strip(): label if is_fine else label.partition(":")[0] for label, text in lines
    }
    shuffled = sorted(questions.items())
    random.Random(0).shuffle(shuffled)
    return shuffled


def draw(questions: list[Question], rows_per_class: int, number: int) -> tuple[list[Question], ...]:
    """Return the rows and the unlabeled texts of a draw."""
    questions = questions.copy()
    random.Random(f"{rows_per_class} {number}").shuffle(questions)
    by_class = defaultdict(list)
    for text, label in questions:
        by_class[label].append((text, label))
    rows = [row for each in by_class.values() for row in each[:rows_per_class]]
    return rows, [question for question in questions if question not in set(rows)][:POOL]


def as_table(questions: list[Question]) -> dict[str, list[str]]:
    """Return questions as columns."""
    return {
        name: [*column]
        for name, column in zip(("text", "label"), zip(*questions, strict=True), strict=True)
    }


def measure(options: argparse.Namespace) -> None:
    """Train all variants of all draws, and append their accuracies to a file."""
    questions = read_questions(options.file)
    held_out, rest = questions[:HELD_OUT], questions[HELD_OUT:]
    for count in options.rows:
        for number in options.draws:
            rows, pool = draw(rest, count, number)
            for variant in options.variants:
                changes = dict(VARIANTS[variant])
                if "unlabeled" in changes:
                    changes["unlabeled"] = [text for text, _ in pool]
                with tempfile.TemporaryDirectory() as folder:
                    results = finetune.run(
                        data=as_table(rows), test_file=as_table(held_out), model=options.model,
                        device=options.device, seed=number, output_dir=f"{folder}/run",
                        feature_cache=False, progress=False, **changes,
                    )  # fmt: skip
                record = {
                    "rows": count,
                    "draw": number,
                    "variant": variant,
                    "accuracy": 100 * results.test.metrics["accuracy"],
                    "seconds": sum(results.stage_seconds.values()),
                    "names": getattr(results.details, "names", ""),
                }
                print(json.dumps(record), flush=True)
                with options.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")


def summarize(files: list[Path]) -> None:
    """Print means, and paired differences from the first variant with their 95% intervals."""
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    accuracy = {(r["variant"], r["rows"], r["draw"]): r["accuracy"] for r in records}
    counts = sorted({r["rows"] for r in records})
    variants = [name for name in VARIANTS if any(r["variant"] == name for r in records)]
    print("| rows per class |", " | ".join(map(str, counts)), "|\n| --- |", "--- |" * len(counts))
    for variant in variants:
        cells = []
        for count in counts:
            draws = sorted(d for name, rows, d in accuracy if (name, rows) == (variant, count))
            values = [accuracy[variant, count, d] for d in draws]
            cell = f"{statistics.mean(values):.1f}" if values else ""
            first = [accuracy.get((variants[0], count, d)) for d in draws]
            if variant != variants[0] and len(values) > 1 and None not in first:
                gains = [value - base for value, base in zip(values, first, strict=True)]
                margin = stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains)
                cell += f" ({statistics.mean(gains):+.1f} ± {margin:.1f})"
            cells.append(cell)
        print(f"| {variant} |", " | ".join(cells), "|")


def main() -> None:
    """Measure, or summarize what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS][1:8])
    parser.add_argument("--out", type=Path, default=Path("few_labels.jsonl"))
    parser.add_argument("--summarize", type=Path, nargs="+")
    options = parser.parse_args()
    summarize(options.summarize) if options.summarize else measure(options)


if __name__ == "__main__":
    main()
