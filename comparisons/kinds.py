"""Pairs, several labels and numbers: ``finetune run`` against run_classification.py's recipe.

    python comparisons/kinds.py --data-dir FOLDER --model minilm --device cuda --seeds 5 --epochs 3

Three tables are made of TREC's questions, another one for each seed, which also draws which of them
train, validate and test:

- ``regression``, like STS-B: a question, and words of it mixed with those of another question; the
  score is the share of all their words that both have, from 0 to 5.
- ``single``, like MRPC: two questions, and whether they are of one fine class.
- ``multi``: a question's coarse class, and which aspects it has, such as a year, as lists.

``finetune run`` finds columns and kind by itself. The Trainer trains on the same rows, with the
epochs, batch size and learning rate that both sides have, and else with the script's defaults: its
last model, a threshold of 0.5. Batches are padded to their longest text. All runs share this
process. The last line is JSON: means, and paired differences in points.
"""

import argparse
import csv
import json
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from scipy import stats
from shared import lower_95, read_questions, trec_parser
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    logging,
    set_seed,
)

import finetune
from finetune.devices.names import DeviceName
from finetune.model.source import find_model
from finetune.tasks.choose import find_kind

BATCH_SIZE, LEARNING_RATE, MAX_TOKENS = 32, 5e-5, 128
# Rows of each split for 1,000 training rows.
SPLITS = {"train": 1000, "validation": 125, "test": 250}
METRICS = {
    "regression": ("pearson", "spearman"),
    "single": ("accuracy", "macro_f1"),
    "multi": ("micro_f1", "macro_f1"),
}
ASPECTS = {
    "number": r"\d",
    "year": r"\b(1\d|20)\d\d\b",
    "superlative": r"\b(most|least|first|last|\w+est)\b",
    "name": r"(?<=[a-z] )[A-Z][a-z]",
    "quotation": r"``",
    "definition": r"^What (is|are|does|do) \w+( \w+)? (mean )?\?$",
    "how": r"\b[Hh]ow\b",
    "person": r"\b[Ww]ho(m|se)?\b",
}
# The second question of a pair is the one of so many, drawn at random, with most words in common.
# Those of one class have more in common than others, so that words alone say something.
CANDIDATES = {True: 8, False: 2}

Row = dict[str, Any]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Question:
    """A question of TREC, with its class, such as ``HUM:ind``."""

    text: str
    fine: str

    @property
    def words(self) -> list[str]:
        """Its words in their order, without punctuation."""
        return re.findall(r"\w+", self.text)


@dataclass(frozen=True)
class Setting:
    """What all runs share; the model is a folder."""

    model: str
    device: DeviceName
    epochs: int


def share_of_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Return how many of all words both have, in 0..1."""
    first, second = ({word.casefold() for word in words} for words in (one, other))
    return len(first & second) / len(first | second)


def make_scores(pool: Sequence[Question], draw: random.Random) -> list[Row]:
    """Return questions beside mixtures of their words and another's."""
    rows = []
    for question in pool:
        kept, other = draw.random(), draw.choice(pool)
        mixed = [word for word in question.words if draw.random() < kept]
        mixed += [word for word in other.words if draw.random() >= kept]
        score = round(5 * share_of_words(question.words, mixed), 2)
        rows.append({"sentence1": question.text, "sentence2": " ".join(mixed), "score": score})
    return [row for row in rows if row["sentence2"]]


def make_pairs(pool: Sequence[Question], draw: random.Random) -> list[Row]:
    """Return pairs of questions, every second of one class where that has two questions."""
    rows = []
    for at, question in enumerate(pool):
        is_same = at % 2 == 0
        others = [one for one in pool if (one.fine == question.fine) == is_same and one != question]
        drawn = draw.sample(others, min(CANDIDATES[is_same], len(others)))
        if drawn:
            second = max(drawn, key=lambda one: share_of_words(question.words, one.words))
            texts = {"sentence1": question.text, "sentence2": second.text}
            rows.append({**texts, "label": int(is_same)})
    return rows


def make_lists(pool: Sequence[Question], _: random.Random) -> list[Row]:
    """Return questions with their coarse class and the aspects that they have."""
    return [
        {
            "text": one.text,
            "labels": [
                one.fine.partition(":")[0],
                *(name for name, pattern in ASPECTS.items() if re.search(pattern, one.text)),
            ],
        }
        for one in pool
    ]


MAKERS: dict[str, Callable[[Sequence[Question], random.Random], list[Row]]] = {
    "regression": make_scores,
    "single": make_pairs,
    "multi": make_lists,
}


def make_table(
    task: str, questions: Sequence[Question], *, rows: int, seed: int
) -> dict[str, list[Row]]:
    """Return the rows of each split; no question is in two of them."""
    draw = random.Random(seed)
    shuffled = draw.sample(questions, len(questions))
    table = {}
    for split, share in SPLITS.items():
        count = rows * share // SPLITS["train"]
        table[split], shuffled = MAKERS[task](shuffled[:count], draw), shuffled[count:]
    return table


def write_rows(rows: Sequence[Row], stem: Path) -> Path:
    """Write rows as JSON lines where they have lists, else as CSV."""
    if "labels" in rows[0]:
        path = stem.with_suffix(".jsonl")
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path
    path = stem.with_suffix(".csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def train_with_finetune(
    task: str, table: dict[str, list[Row]], setting: Setting, *, seed: int, folder: Path
) -> Metrics:
    """Return the test metrics of a run that finds out the columns and the kind."""
    files = {split: str(write_rows(rows, folder / split)) for split, rows in table.items()}
    results = finetune.run(
        data=files["train"],
        validation_file=files["validation"],
        test_file=files["test"],
        model=setting.model,
        device=setting.device,
        precision="fp32",
        batch_size=BATCH_SIZE,
        num_train_epochs=setting.epochs,
        learning_rate=LEARNING_RATE,
        max_length=MAX_TOKENS,
        save_strategy="no",
        seed=seed,
        output_dir=str(folder / "run"),
    )
    if results.task.name != task:
        raise SystemExit(f"finetune took the table {task} for {results.task.name}")
    found = results.test.to_json()
    return {name: found[name] for name in METRICS[task]}


def train_with_trainer(
    task: str, table: dict[str, list[Row]], setting: Setting, *, seed: int, folder: Path
) -> Metrics:
    """Return the test metrics of the Trainer's last model."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    classes = sorted({name for row in table["train"] for name in row.get("labels", ())})
    model = AutoModelForSequenceClassification.from_pretrained(
        setting.model,
        num_labels={"regression": 1, "single": 2, "multi": len(classes)}[task],
        problem_type=find_kind(task).problem_type,
        dtype="float32",
    )
    train, test = (
        Dataset.from_list([encode(row, tokenizer, classes) for row in table[split]])
        for split in ("train", "test")
    )
    trainer = Trainer(
        model=model,
        args=trainer_arguments(setting, seed=seed, folder=folder),
        train_dataset=train,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    answers = trainer.predict(test)
    return score(task, answers.predictions, answers.label_ids)


def trainer_arguments(setting: Setting, *, seed: int, folder: Path) -> TrainingArguments:
    """Return what differs from the Trainer's defaults."""
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        num_train_epochs=setting.epochs,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=setting.device == "cpu",
    )


def encode(row: Row, tokenizer: Any, classes: Sequence[str]) -> Row:
    """Return a row's token ids and its label, of several classes as 0 and 1."""
    texts = [row[name] for name in ("text", "sentence1", "sentence2") if name in row]
    length = min(MAX_TOKENS, tokenizer.model_max_length)
    inputs = tokenizer(*texts, truncation=True, max_length=length)
    if "labels" in row:
        return {**inputs, "label": [float(name in row["labels"]) for name in classes]}
    return {**inputs, "label": row.get("score", row.get("label"))}


def score(task: str, logits: Any, labels: Any) -> Metrics:
    """Return the metrics of the Trainer's logits."""
    if task == "regression":
        numbers = np.squeeze(logits)
        return {
            "pearson": float(stats.pearsonr(numbers, labels).statistic),
            "spearman": float(stats.spearmanr(numbers, labels).statistic),
        }
    if task == "single":
        predicted = logits.argmax(-1)
        found = {"accuracy": accuracy_score(labels, predicted)}
    else:
        # A probability of 0.5.
        predicted = logits > 0
        found = {"micro_f1": f1_score(labels, predicted, average="micro", zero_division=0)}
    found["macro_f1"] = f1_score(labels, predicted, average="macro", zero_division=0)
    return {name: float(value) for name, value in found.items()}


SIDES = {"ours": train_with_finetune, "trainer": train_with_trainer}


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Return means in percent, and the paired difference in points with its lower 95 % bound."""
    first, second = 100 * np.asarray(ours), 100 * np.asarray(theirs)
    return {
        "ours": float(first.mean()),
        "trainer": float(second.mean()),
        "difference": float((first - second).mean()),
        "lower_95": lower_95((first - second).tolist()),
    }


def parse_arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = trec_parser(__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=METRICS, default=list(METRICS))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000, help="training rows; a quarter are tests")
    return parser.parse_args()


def main() -> None:
    """Train both sides on every table with every seed; print each result, and the summary."""
    arguments = parse_arguments()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = find_model(arguments.model, revision=None).folder
    setting = Setting(str(model), arguments.device, arguments.epochs)
    # Each question once.
    questions = [Question(*one) for one in dict(read_questions(arguments.data_dir)).items()]
    found: dict[tuple[str, str], list[Metrics]] = defaultdict(list)
    for seed, task in product(range(arguments.seeds), arguments.tasks):
        table = make_table(task, questions, rows=arguments.rows, seed=seed)
        for side, train in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                metrics = train(task, table, setting, seed=seed, folder=Path(folder))
            found[task, side].append(metrics)
            shown = {name: round(value, 4) for name, value in metrics.items()}
            print(f"seed {seed}, {task}, {side}: {shown}", flush=True)
    summary = {
        f"{task} {name}": compare(*([one[name] for one in found[task, side]] for side in SIDES))
        for task in arguments.tasks
        for name in METRICS[task]
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
