"""What windows find of texts longer than a model reads at once, and what memory they take.

    python comparisons/long_texts.py accuracy --device cuda --rows 1000 --epochs 12 --seeds 3
    python comparisons/long_texts.py memory

A small BERT with random weights, made by this script, reads made-up texts. `accuracy`: one token
in ten of a long text is evidence of its class, all of it after token 512; the evidence of short
texts is as frequent. The model begins to learn after about 80 steps of either, and windows need
about 200, so that fewer show nothing. `memory`: the peak of anonymous memory (Linux) in training
and in prediction, on texts of 512 and of 20,000 tokens, each in a process of its own. The last line
is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import finetune
from finetune.devices.names import DeviceName
from finetune.tokenization.long_texts import Pooling

CLASSES, EVIDENCE_WORDS, NOISE_WORDS = 4, 5, 400
WINDOW, SHORT_TOKENS, LONG_TOKENS, VERY_LONG_TOKENS = 512, 100, 1_100, 20_000
# What has a process of its own; the second uses the run of the first.
PARTS = ("training", "prediction")
# Rows of each split for 100 training rows.
SPLITS = {"train": 100, "validation": 10, "test": 50}


@dataclass(frozen=True)
class Setting:
    """What all trainings share."""

    device: DeviceName
    rows: int
    epochs: int
    pooling: Pooling


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["accuracy", "memory", *PARTS])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=400, help="training rows; half as many tests")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pooling", choices=["mean", "max"], default="mean")
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    setting = Setting(given.device, given.rows, given.epochs, given.pooling)
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "accuracy":
            print(json.dumps(compare_accuracy(Path(folder), setting, seeds=given.seeds)))
        elif given.what == "memory":
            print(json.dumps(compare_memory(Path(folder))))
        elif given.what == "training":
            print(json.dumps(measure_training(given.folder, tokens=given.tokens)))
        else:
            print(json.dumps(measure_prediction(given.folder)))


def save_model(folder: Path, *, seed: int) -> Path:
    """Save a BERT of one layer with random weights, and a tokenizer of whole words."""
    words = [f"noise{number}" for number in range(NOISE_WORDS)]
    words += [f"sign{each}x{one}" for each in range(CLASSES) for one in range(EVIDENCE_WORDS)]
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=WINDOW, pad_token="[PAD]",
        unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=128, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    BertModel(config).save_pretrained(folder)
    return folder


def write_texts(path: Path, *, rows: int, tokens: int, seed: int) -> Path:
    """Write texts of random words; in the end of each, a tenth of all its words are evidence."""
    random = np.random.default_rng(seed)
    first = WINDOW if tokens > WINDOW else 0
    lines = []
    for row in range(rows):
        words = [f"noise{number}" for number in random.integers(NOISE_WORDS, size=tokens)]
        for at in random.choice(np.arange(first, tokens), max(1, tokens // 10), replace=False):
            words[at] = f"sign{row % CLASSES}x{random.integers(EVIDENCE_WORDS)}"
        lines.append(json.dumps({"text": " ".join(words), "label": f"class{row % CLASSES}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def compare_accuracy(folder: Path, setting: Setting, *, seeds: int) -> dict[str, dict[str, float]]:
    """Return the test accuracy on short texts and on long ones: mean over seeds, and the least."""
    found: dict[str, list[float]] = {"short": [], "truncate": [], "windows": []}
    for seed, (name, accuracies) in product(range(seeds), found.items()):
        accuracies.append(train(folder / f"{name}-{seed}", name, setting, seed=seed))
        print(f"seed {seed}, {name}: {accuracies[-1]:.3f}", flush=True)
    return {
        name: {"mean": statistics.mean(each), "least": min(each)} for name, each in found.items()
    }


def train(folder: Path, name: str, setting: Setting, *, seed: int) -> float:
    """Return the test accuracy of one training, on texts and with a model of the seed."""
    folder.mkdir()
    tokens = SHORT_TOKENS if name == "short" else LONG_TOKENS
    files = {
        split: write_texts(
            folder / f"{split}.jsonl", rows=setting.rows * share // SPLITS["train"], tokens=tokens,
            seed=100 * seed + at,
        )
        for at, (split, share) in enumerate(SPLITS.items())
    }  # fmt: skip
    results = finetune.run(
        data=str(files["train"]),
        validation_file=str(files["validation"]),
        test_file=str(files["test"]),
        model=str(save_model(folder / "model", seed=seed)),
        device=setting.device,
        precision="fp32",
        max_length=WINDOW,
        long_texts="windows" if name == "windows" else "truncate",
        pooling=setting.pooling,
        batch_size=16,
        learning_rate=1e-3,
        num_train_epochs=setting.epochs,
        early_stopping_patience=0,
        output_dir=str(folder / "run"),
        seed=seed,
    )
    return float(results.to_json()["test_accuracy"])


def compare_memory(folder: Path) -> dict[str, dict[str, float]]:
    """Return the peaks in MiB at both lengths, and their ratio."""
    peaks: dict[str, list[float]] = {part: [] for part in PARTS}
    for tokens, part in product((WINDOW - 2, VERY_LONG_TOKENS), PARTS):
        own = folder / str(tokens)
        own.mkdir(exist_ok=True)
        options = ["--tokens", str(tokens), "--folder", str(own)]
        command = [sys.executable, __file__, part, *options]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peaks[part].append(json.loads(output.splitlines()[-1]))
        print(f"{tokens:,} tokens a text, {part}: {peaks[part][-1]:.0f} MiB", flush=True)
    return {
        part: {"short": short, "long": long, "ratio": long / short}
        for part, (short, long) in peaks.items()
    }


def measure_training(folder: Path, *, tokens: int) -> float:
    """Train on a few texts, as many as a batch in each split or more; return the peak in MiB."""
    rows = write_texts(folder / "rows.jsonl", rows=16, tokens=tokens, seed=0)
    with Watch() as watch:
        finetune.run(
            data=str(rows), validation_fraction=0.25, test_fraction=0.25,
            model=str(save_model(folder / "model", seed=0)), device="cpu", precision="fp32",
            max_length=WINDOW, long_texts="windows", batch_size=8, eval_batch_size=8, max_steps=2,
            output_dir=str(folder / "run"),
        )  # fmt: skip
    return watch.peak_mib


def measure_prediction(folder: Path) -> float:
    """Classify the texts that were trained on; return the peak in MiB."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    with Watch() as watch:
        finetune.predict(folder / "run", [json.loads(line)["text"] for line in lines], device="cpu")
    return watch.peak_mib


class Watch:
    """The peak of this process's anonymous memory while the context lasts."""

    def __enter__(self) -> "Watch":
        """Start to look every 10 ms."""
        self.peak_mib, self._is_over = 0.0, False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._is_over = True
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            self.peak_mib = max(self.peak_mib, int(line.split()[1]) / 1024)
            time.sleep(0.01)


if __name__ == "__main__":
    main()
