"""Compares explanations with integrated gradients of captum, and with random words.

    PYTHONPATH=.:CAPTUM python comparisons/explanations.py train_5500.label --data questions
    PYTHONPATH=.:CAPTUM python comparisons/explanations.py train_5500.label --data long

CAPTUM is a folder with captum, and matplotlib, which it imports. For the three words that a method
ranks first, a line has the fall of the probability of the predicted class without them, the fall
with [MASK] in their place, the probability of a text that has only them, the percentage that the
first method finds too, and CPU time per text.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from few_labels import as_table, read_questions
from long_texts import make_long_texts
from numpy.typing import NDArray

import finetune
from finetune.runs.folder import RunFolder
from finetune.runs.trained import TrainedModel
from finetune.tasks.explanation import Spans, find_words, leave_out

Rank = dict[str, float]
MODELS: dict[str, dict[str, Any]] = {
    "full": {"contrastive": "off", "num_train_epochs": 3},
    "head": {"freeze_core": True},
    "few-shot": {"contrastive": "on", "class_names": "off"},
}


def measure(model: TrainedModel, texts: Sequence[str], chosen: Sequence[str]) -> None:
    """Print a line for each method."""
    network, tokenizer = model.text_model.model, model.text_model.tokenizer
    words: list[dict[str, Spans]] = [find_words(text) for text in texts]

    def read(texts: Sequence[str]) -> NDArray[np.float32]:
        return np.asarray(model.text_model.task.read_logits(model.text_logits(texts)).probabilities)

    classes, before = read(texts).argmax(1), read(texts).max(1)

    def spans_of(row: int, some: Iterable[str]) -> list[tuple[int, int]]:
        return sorted(chain.from_iterable(words[row][word] for word in some))

    def without(row: int, some: Iterable[str], put: str = "") -> str:
        """Return a text without some words, or with another word in place of each."""
        text = texts[row]
        for start, end in reversed(spans_of(row, some)):
            text = f"{text[:start]}{put}{text[end:]}" if put else leave_out(text, [(start, end)])
        return text

    def only(row: int, some: Iterable[str]) -> str:
        return " ".join(texts[row][start:end] for start, end in spans_of(row, some))

    def rank(change: Callable[[int, list[str]], str]) -> list[Rank]:
        """Return the fall of the probability if a text is changed by each of its words."""
        parts = [(row, word) for row, found in enumerate(words) for word in found]
        after = read([change(row, [word]) for row, word in parts])
        ranks: list[Rank] = [{} for _ in texts]
        for (row, word), values in zip(parts, after, strict=True):
            ranks[row][word] = float(before[row] - values[classes[row]])
        return ranks

    def explain() -> list[Rank]:
        predictions = model.predict(texts, explains=True)
        return [{change.word.casefold(): -change.change for change in each.explanation or ()}
                for each in predictions]  # fmt: skip

    def with_alone() -> list[Rank]:
        both = zip(rank(without), rank(only), strict=True)
        return [{word: fall[word] - lost[word] / 4 for word in fall} for fall, lost in both]

    def captum() -> list[Rank]:
        """Sum the integrated gradients of the tokens of each word, from a text of padding."""
        from captum.attr import LayerIntegratedGradients

        ranks: list[Rank] = [dict.fromkeys(found, 0.0) for found in words]
        method = LayerIntegratedGradients(
            lambda ids: network(input_ids=ids).logits.softmax(1), network.get_input_embeddings()
        )
        for text, found, label, ranked in zip(texts, words, classes.tolist(), ranks, strict=True):
            encoded = tokenizer(text, truncation=True, max_length=model.config.model.max_length,
                                return_tensors="pt", return_offsets_mapping=True)  # fmt: skip
            ids = encoded["input_ids"].to(network.device)
            padding = torch.full_like(ids, tokenizer.pad_token_id)
            padding[:, [0, -1]] = ids[:, [0, -1]]
            values = method.attribute(ids, padding, label, n_steps=50, internal_batch_size=10)
            names = {at: word for word in found for span in found[word] for at in range(*span)}
            for place, value in zip(encoded["offset_mapping"][0].tolist(), values[0], strict=True):
                if place != [0, 0] and place[0] in names:
                    ranked[names[place[0]]] += value.sum().item()
        return ranks

    mask, draw = partial(without, put=tokenizer.mask_token), random.Random(0)
    methods: dict[str, Callable[[], list[Rank]]] = {
        "left out": partial(rank, without),
        "[MASK]": partial(rank, mask),
        "explain": explain,
        "with alone": with_alone,
        "random": lambda: [{word: draw.random() for word in found} for found in words],
        "captum": captum,
    }
    reference = list[list[str]]()
    print("| method | fall | with [MASK] | kept | same words | CPU ms per text |")
    for name in chosen or methods:
        start = time.process_time()
        best = [sorted(of_row, key=of_row.__getitem__)[-3:] for of_row in methods[name]()]
        ms = 1000 * (time.process_time() - start) / len(texts)
        reference = reference or best
        same = sum(len({*one} & {*two}) for one, two in zip(reference, best, strict=True))
        left = [
            read([change(row, some) for row, some in enumerate(best)])[range(len(texts)), classes]
            for change in (without, mask, only)
        ]
        falls, of_all = before - np.array(left), sum(map(len, reference))
        print(f"| {name} | {falls[0].mean():.3f} | {falls[1].mean():.3f} | {left[2].mean():.3f} "
              f"| {same / of_all:.0%} | {ms:.0f} |", flush=True)  # fmt: skip


def main() -> None:
    """Train a model, unless its folder exists, and measure the methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", choices=("questions", "long"), default="questions")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    if not find_spec("captum"):
        sys.exit("needs captum: see --help")
    is_long, questions = options.data == "long", read_questions(options.file)
    held_out, rows = questions[:200], questions[200:800]
    if is_long:
        held_out, rows = (make_long_texts(200, held_out=side) for side in (True, False))
    for name in options.models:
        folder = options.runs / f"{options.data}-{name}"
        if not folder.exists():
            finetune.run(
                data=as_table(rows[:100] if name == "few-shot" else rows), model="minilm",
                output_dir=str(folder), device=options.device, feature_cache=False, progress=False,
                max_length=256 if is_long else 64, **MODELS[name],
            )  # fmt: skip
        print(f"{options.data}, {name}", flush=True)
        model = TrainedModel.load(RunFolder(folder), device=options.device)
        measure(model, [text for text, _ in held_out[: options.texts]], options.methods)


if __name__ == "__main__":
    main()
