"""Accuracy and time of ``finetune run`` and of ``transformers.Trainer`` on the same rows of TREC.

Both fine-tune all of MiniLM for 3 epochs at batch size 32 and a peak rate of 1e-4, in turn. For
each seed another tenth of train_5500 is held out as test split; the Trainer trains on the same rows
as we do and, as is its default, keeps its last model.

    python comparisons/trec_trainer.py --data-dir FOLDER --seeds 5

The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import finetune
from finetune.config.load import load_config
from finetune.events import ignore
from finetune.model.source import find_model
from finetune.runs.preparation import load_run_data

EPOCHS, BATCH_SIZE, LEARNING_RATE = 3, 32, 1e-4


def run_ours(options: dict[str, object], folder: Path) -> tuple[float, float]:
    """Return test accuracy and seconds of ``finetune run``."""
    results = finetune.run(**options, output_dir=str(folder / "ours"))
    return results.test.accuracy, results.training.train_runtime


def run_trainer(options: dict[str, object], folder: Path) -> tuple[float, float]:
    """Return test accuracy and seconds of the Trainer, tokenization included."""
    loaded = load_config(file=None, environment={}, flags=options, assignments=())
    table = load_run_data(loaded.config.data, emit=ignore).splits
    source = find_model(loaded.config.model.model, revision=None).folder
    seed = loaded.config.training.seed
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(source)
    # Without a type transformers would train in that of the saved weights, which may be fp16.
    model = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=6, dtype=torch.float32
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=options["device"] == "cpu",
        ),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    started = time.perf_counter()
    trainer.train_dataset = table["train"].map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=128),
        batched=True,
        remove_columns=["text"],
    )
    trainer.train()
    seconds = time.perf_counter() - started
    test = table["test"].map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True
    )
    logits = trainer.predict(test.remove_columns("text")).predictions
    return float((logits.argmax(-1) == np.array(table["test"]["label"])).mean()), seconds


def main() -> None:
    """Run both sides for each seed and print what they reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", default="minilm", help="minilm, or a folder with its weights")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        options: dict[str, object] = {
            "data": "trec",
            "data_dir": arguments.data_dir,
            "model": arguments.model,
            "device": arguments.device,
            "seed": seed,
            "split_seed": seed,
        }
        with tempfile.TemporaryDirectory() as folder:
            ours, our_seconds = run_ours(options, Path(folder))
            theirs, their_seconds = run_trainer(options, Path(folder))
        rows.append((ours, theirs, our_seconds, their_seconds))
        print(
            f"seed {seed}: ours {ours:.4f} in {our_seconds:.0f} s, "
            f"Trainer {theirs:.4f} in {their_seconds:.0f} s",
            flush=True,
        )
    differences = [ours - theirs for ours, theirs, *_ in rows]
    error = statistics.stdev(differences) / len(rows) ** 0.5
    bound = statistics.mean(differences) - stats.t.ppf(0.95, len(rows) - 1) * error
    print(
        json.dumps(
            {
                "accuracy_ours": statistics.mean(row[0] for row in rows),
                "accuracy_trainer": statistics.mean(row[1] for row in rows),
                "difference_lower_95": bound,
                "seconds_ours": statistics.median(row[2] for row in rows),
                "seconds_trainer": statistics.median(row[3] for row in rows),
                "ratio": statistics.median(theirs / ours for *_, ours, theirs in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
