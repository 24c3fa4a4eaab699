"""What it saves that a frozen core runs once, against ``transformers.Trainer`` and ``full``.

BERT-base from its config, with random weights, on rows of TREC at batch size 32, in fp32. In turn:
the Trainer with a frozen core; the head alone for as many epochs, from an empty store; the same
with another seed, from the store; the last two layers; the whole model. Then, in a process of its
own, the memory that training the head at batch size 64 adds to the loaded model.

    python comparisons/frozen_core.py --data-dir FOLDER --rows 1000 --repeats 3

The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import finetune
from finetune.config.load import load_config
from finetune.events import Event, Stage, ignore
from finetune.model.source import find_model
from finetune.runs.preparation import load_run_data

HEAD_EPOCHS, LAYERS_EPOCHS, BATCH_SIZE = 5, 3, 32
SIDES = ("trainer_head", "head", "head_again", "last_2", "full")
RATIOS = {"head_over_trainer": ("trainer_head", "head"), "last_2_over_full": ("full", "last_2")}


def save_bert_base(folder: Path) -> Path:
    """Write BERT-base with random weights, and the tokenizer of its vocabulary."""
    set_seed(0)
    BertModel(BertConfig()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(find_model("minilm", revision=None).folder).save_pretrained(
        folder
    )
    return folder


def run_trainer(options: dict[str, object], folder: Path) -> float:
    """Return the training seconds of the Trainer with a frozen core."""
    loaded = load_config(file=None, environment={}, flags=options, assignments=())
    rows = load_run_data(loaded.config.data, emit=ignore).splits["train"]
    tokenizer = AutoTokenizer.from_pretrained(str(options["model"]))
    model = AutoModelForSequenceClassification.from_pretrained(str(options["model"]), num_labels=6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("bert.pooler", "classifier")))
    encoded = rows.map(lambda batch: tokenizer(batch["text"]), batched=True)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            num_train_epochs=HEAD_EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=encoded,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return float(trainer.train().metrics["train_runtime"])


def run_ours(options: dict[str, object], folder: Path, **more: object) -> float:
    """Return the training seconds of ``finetune run``, the pass over the frozen core included."""
    results = finetune.run(
        **options,
        **more,
        output_dir=str(folder / "run"),
        overwrite=True,
        cache_dir=str(folder / "cache"),
    )
    return float(results.training.train_runtime)


def measure_once(
    options: dict[str, object], folder: Path, *, sides: Sequence[str]
) -> dict[str, float]:
    """Return the seconds of each side, one after the other."""
    head = {"freeze_core": True, "num_train_epochs": HEAD_EPOCHS}
    shutil.rmtree(folder / "cache", ignore_errors=True)
    runs = {
        "trainer_head": lambda: run_trainer(options, folder),
        "head": lambda: run_ours(options, folder, **head),
        "head_again": lambda: run_ours(options, folder, **head, seed=7),
        "last_2": lambda: run_ours(options, folder, train_layers=2, num_train_epochs=LAYERS_EPOCHS),
        "full": lambda: run_ours(options, folder, num_train_epochs=LAYERS_EPOCHS),
    }
    return {side: runs[side]() for side in sides}


def anonymous_mebibytes() -> float:
    """Return this process's resident memory that is no file's, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def print_added_memory(options: dict[str, object], folder: Path) -> None:
    """Train the head and print the anonymous memory that came on top of the loaded model."""
    samples: list[float] = []
    is_over = threading.Event()
    loaded = [0.0]

    def note(event: Event) -> None:
        if isinstance(event, Stage) and event.message.startswith("model: "):
            loaded[0] = anonymous_mebibytes()
        # What reports and their libraries take is not training's.
        if isinstance(event, Stage) and event.message.startswith("evaluating "):
            is_over.set()

    def sample() -> None:
        while not is_over.wait(0.01):
            samples.append(anonymous_mebibytes())

    thread = threading.Thread(target=sample)
    thread.start()
    finetune.run(
        **{**options, "batch_size": 64},
        freeze_core=True,
        num_train_epochs=HEAD_EPOCHS,
        output_dir=str(folder / "memory"),
        cache_dir=str(folder / "memory_cache"),
        emit=note,
    )
    thread.join()
    print(max(samples) - loaded[0])


def main() -> None:
    """Measure, print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--memory-in", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options: dict[str, object] = {
        "data": "trec",
        "data_dir": arguments.data_dir,
        "max_train_samples": arguments.rows,
        "batch_size": BATCH_SIZE,
        "device": "cpu",
        # The Trainer validates nothing, and our frozen pass goes over all splits.
        "validation_fraction": 0.0,
        "test_fraction": 0.01,
    }
    if arguments.memory_in:
        folder = Path(arguments.memory_in)
        print_added_memory({**options, "model": str(folder / "bert-base")}, folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options["model"] = str(save_bert_base(folder / "bert-base"))
        rounds = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            rounds.append(measure_once(options, folder, sides=arguments.sides))
            print({side: round(seconds, 1) for side, seconds in rounds[-1].items()}, flush=True)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)
        child = subprocess.run(
            [sys.executable, __file__, "--data-dir", arguments.data_dir, "--memory-in", name],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds = {side: statistics.median(one[side] for one in rounds) for side in rounds[0]}
        print(
            json.dumps(
                {
                    "rows": arguments.rows,
                    "median_seconds": seconds,
                    **{
                        name: seconds[slower] / seconds[quicker]
                        for name, (slower, quicker) in RATIOS.items()
                        if {slower, quicker} <= seconds.keys()
                    },
                    "added_memory_mebibytes": float(child.stdout.splitlines()[-1]),
                }
            )
        )


if __name__ == "__main__":
    main()
