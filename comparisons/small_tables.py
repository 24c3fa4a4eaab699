"""Which number of epochs suits small tables: MiniLM on five sets of 150 to 1,000 rows.

    python comparisons/small_tables.py --data-dir FOLDER --model minilm --seeds 5

A recipe is `default`, or options such as `num_train_epochs=10`; `steps=400` stands for the number
of epochs that gives at least so many steps, and `most=40` for the most epochs. Each recipe trains
on each set with each seed, which draws the validation split too. The last line is JSON.
"""

import csv
import json
import math
import random
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from shared import read_questions, trec_parser

import finetune
from finetune.data.questions import load_questions

Row = tuple[str, str]
BATCH_SIZE = 32
TEST_ROWS = 1500
RECIPES = [
    "num_train_epochs=3",
    "num_train_epochs=10",
    "num_train_epochs=20",
    "num_train_epochs=40",
    "default",
]
SUBJECTS = {
    "delivery": ("parcel", "courier", "tracking number", "doorstep", "van"),
    "billing": ("invoice", "refund", "credit card", "amount", "tax line"),
    "account": ("password", "login", "profile", "e-mail address", "username"),
    "defect": ("screen", "battery", "button", "cable", "hinge"),
    "praise": ("staff", "shop", "colour", "price", "wrapping"),
}
COMPLAINTS = (
    "the {} is still missing after {} days",
    "please look at my {}, it has been wrong since order {}",
    "I wrote {1} times about the {0} and got no answer",
    "something about the {} changed {} hours ago",
)
GOOD, BAD = ("kind", "quick", "clear", "warm", "honest"), ("rude", "slow", "vague", "cold", "dull")
OPINIONS = (
    "the guide was {} and we stayed {} hours",
    "after {1} days I would call the service {0}",
    "not {} at all, whatever the {} reviews say",
    "nobody told us how {} they are, {} of us were surprised",
)


class Table(NamedTuple):
    """Training and test rows."""

    train: list[Row]
    test: list[Row]


def make_tables(folder: str) -> dict[str, Table]:
    """Return the sets by name, the same at every call."""
    trec = [(text.strip(), fine.partition(":")[0]) for text, fine in read_questions(folder)]
    random.Random(0).shuffle(trec)
    questions = load_questions().splits
    names = questions["train"].features["label"].names
    train, test = (
        [(row["text"], names[row["label"]]) for row in questions[split]]
        for split in ("train", "test")
    )
    return {
        "trec-1000": Table(trec[:1000], trec[-TEST_ROWS:]),
        "trec-300": Table(trec[:300], trec[-TEST_ROWS:]),
        "questions-240": Table(train[:240], test),
        "tickets-150": Table(tickets(150, seed=1), tickets(TEST_ROWS, seed=2)),
        "opinions-500": Table(opinions(500, seed=3), opinions(TEST_ROWS, seed=4)),
    }


def tickets(rows: int, *, seed: int) -> list[Row]:
    """Make up support tickets of five classes of uneven size."""
    draw = random.Random(seed)
    labels = draw.choices(list(SUBJECTS), weights=(5, 4, 3, 2, 1), k=rows)
    return [
        (draw.choice(COMPLAINTS).format(draw.choice(SUBJECTS[label]), draw.randint(2, 99)), label)
        for label in labels
    ]


def opinions(rows: int, *, seed: int) -> list[Row]:
    """Make up opinions, half of them with a negation that turns the word around."""
    draw = random.Random(seed)
    made = []
    for _ in range(rows):
        is_good, template = draw.random() < 0.5, draw.randrange(len(OPINIONS))
        word = draw.choice(GOOD if is_good != (template == 2) else BAD)
        text = OPINIONS[template].format(word, draw.randint(2, 99))
        made.append((text, "good" if is_good else "bad"))
    return made


def options_of(recipe: str, *, rows: int) -> dict[str, Any]:
    """Return a recipe as options of a run."""
    if recipe == "default":
        return {}
    pairs = (part.split("=") for part in recipe.split(","))
    given: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs}
    options = {key: value for key, value in given.items() if key not in ("steps", "most")}
    if "steps" in given:
        steps_per_epoch = math.ceil(0.9 * rows / BATCH_SIZE)
        epochs = max(3, math.ceil(given["steps"] / steps_per_epoch))
        options["num_train_epochs"] = min(epochs, given.get("most", epochs))
    return options


def train(job: tuple[str, str, int, dict[str, Any], str, int]) -> tuple[str, str, float]:
    """Train once; return set, recipe and test accuracy in percent."""
    name, recipe, seed, shared, folder, rows = job
    with tempfile.TemporaryDirectory() as output:
        results = finetune.run(
            **shared,
            **options_of(recipe, rows=rows),
            data=f"{folder}/{name}-train.csv",
            test_file=f"{folder}/{name}-test.csv",
            text_column="text",
            label_column="label",
            seed=seed,
            split_seed=seed,
            output_dir=f"{output}/run",
            save_strategy="no",
        )
    return name, recipe, 100 * results.test.accuracy


def main() -> None:
    """Train all, and print a table of means."""
    parser = trec_parser(__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    tables = make_tables(arguments.data_dir)
    names = arguments.sets or list(tables)
    shared = {"model": arguments.model, "device": arguments.device, "precision": "fp32"}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for split, rows in tables[name]._asdict().items():
                with Path(folder, f"{name}-{split}.csv").open("w", newline="") as file:
                    csv.writer(file).writerows([("text", "label"), *rows])
        jobs = [
            (name, recipe, seed, shared, folder, len(tables[name].train))
            for seed, name, recipe in product(range(arguments.seeds), names, arguments.recipes)
        ]
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            found = list(pool.map(train, jobs))
    means = {
        name: {
            recipe: round(statistics.mean(a for n, r, a in found if (n, r) == (name, recipe)), 2)
            for recipe in arguments.recipes
        }
        for name in names
    }
    for name, by_recipe in means.items():
        print(name)
        for recipe, mean in by_recipe.items():
            print(f"  {mean:6.2f} %  {recipe}")
    print(json.dumps(means))


if __name__ == "__main__":
    main()
