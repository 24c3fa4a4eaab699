"""How long tables take: ``finetune init``, ``run --dry-run``, and ``load_dataset`` with ``map``.

Tables of made-up words, about 70 bytes a row in six classes. In turn, in processes of their own:
``init`` and ``run --dry-run``, with the tokens counted, on the large table; on the small one,
``run --dry-run``, and what it is compared with: ``load_dataset``, two ``train_test_split`` and a
batched ``map`` of the same tokenizer.

    python comparisons/tables.py --rows 1000000 --small-rows 200000 --repeats 3

The last line is JSON: median wall and CPU seconds, and the highest peak of memory.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shared import Measured, measure_process

SYLLABLES = ("ba", "ko", "li", "mu", "ne", "ra", "si", "to", "ve", "ze", "stu", "ing", "er")
WORDS, CLASSES, ROWS_A_PIECE = 20_000, 6, 50_000
MODEL = "minilm"


def write_table(path: Path, *, rows: int) -> None:
    """Write a table with the columns ``text`` and ``label``; a few words are in most texts."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 4, size=WORDS)
    words = np.array(["".join(random.choice(SYLLABLES, size=length)) for length in lengths])
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n")
        for start in range(0, rows, ROWS_A_PIECE):
            counts = random.integers(7, 15, size=min(ROWS_A_PIECE, rows - start))
            ranks = (random.pareto(0.8, size=counts.sum()) * 20).clip(max=WORDS - 1)
            texts = np.split(words[ranks.astype(int)], np.cumsum(counts)[:-1])
            labels = random.integers(0, CLASSES, size=len(counts))
            file.writelines(
                f"{' '.join(text)},class{label}\n"
                for text, label in zip(texts, labels, strict=True)
            )


def load_and_map(table: Path) -> None:
    """Split a table and turn its texts into ids, as a script around datasets does."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    from finetune.model.source import find_model

    tokenizer = AutoTokenizer.from_pretrained(find_model(MODEL, revision=None).folder)
    rows = load_dataset("csv", data_files=str(table), split="train")
    first = rows.train_test_split(test_size=0.1, seed=0)
    second = first["train"].train_test_split(test_size=1 / 9, seed=0)
    for part in (second["train"], second["test"], first["test"]):
        part.map(lambda piece: tokenizer(piece["text"], truncation=True), batched=True)


def measure(command: Sequence[str], *, folder: Path) -> Measured:
    """Run Python with these arguments, from an empty cache of datasets."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = {"HF_DATASETS_CACHE": cache, "TOKENIZERS_PARALLELISM": "true"}
        return measure_process(command, folder=Path(cache), environment=environment)


def median_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the median times, and the highest peak in GiB."""
    return {
        "wall_seconds": round(statistics.median(one.wall_seconds for one in measured), 2),
        "cpu_seconds": round(statistics.median(one.cpu_seconds for one in measured), 2),
        "peak_gib": round(max(one.peak_bytes for one in measured) / 2**30, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--small-rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--map", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.map:
        load_and_map(options.map)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large, small = folder / "large.csv", folder / "small.csv"
        write_table(large, rows=options.rows)
        write_table(small, rows=options.small_rows)
        dry_run = ["-m", "finetune", "run", "--dry-run", "--model", MODEL, "--data"]
        commands = {
            "init": ["-m", "finetune", "init", str(large), "--model", MODEL],
            "dry_run": [*dry_run, str(large)],
            "small_dry_run": [*dry_run, str(small)],
            "load_and_map": [str(Path(__file__).resolve()), "--map", str(small)],
        }
        measured: dict[str, list[Measured]] = {one: [] for one in commands}
        for _ in range(options.repeats):
            for one, command in commands.items():
                measured[one].append(measure(command, folder=folder))
                print(one, measured[one][-1], flush=True)
    medians = {one: median_of(own) for one, own in measured.items()}
    ours, theirs = (medians[one] for one in ("small_dry_run", "load_and_map"))
    ratios = {
        f"small_dry_run_over_load_and_map_{unit}": round(ours[unit] / theirs[unit], 3)
        for unit in ("wall_seconds", "cpu_seconds")
    }
    print(json.dumps({**medians, **ratios}))


if __name__ == "__main__":
    main()
