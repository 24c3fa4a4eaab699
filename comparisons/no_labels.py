"""Measures class prototypes without labels on TREC.

    python comparisons/no_labels.py train_5500.label --model minilm

Each split has 1,500 other questions to test on; its unlabeled texts are drawn from the rest.
"""

import argparse
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from few_labels import HELD_OUT, WORDS
from numpy.typing import NDArray
from scipy.special import softmax
from transformers import AutoModel, AutoTokenizer

from finetune.model.source import find_model
from finetune.training.linear_head import normalize

Array = NDArray[np.float32]
POOLS, SPLITS, TEMPERATURES = (3_881, 500, 100), 5, np.geomspace(0.08, 0.5, 40)
# Mean confidence relative to the agreement; names with a lower fit are poor.
CONFIDENCE, MIN_FIT = 0.9, 0.2
# Written in the shape of questions, without looking at the data.
QUESTIONS = {
    "HUM": "Who was the first president?|What is the name of the woman who did it?",
    "LOC": "Where is it?|What city or country is it in?|What is the capital of a state?",
    "NUM": "How many are there?|When was it?|How much does it cost?",
    "ENTY": "What kind of animal is it?|What is the name of the product?|What thing is it?",
    "DESC": "What is the definition of it?|How does it work?|Why did it happen?",
    "ABBR": "What does the abbreviation stand for?|What is the full form of CNN?",
}
# Names of the fine classes, in the order of their codes.
FINE = """abbreviation|meaning of an abbreviation|definition|description|manner|reason|animal
part of the body|color|creative work|currency|disease or medicine|event|food|musical instrument
language|letter|other entity|plant|product|religion|sport|substance|symbol|technique or method
equivalent term|vehicle|word|description of a person|group or organization|individual person
title of a person|city|country|mountain|other location|state|code|count|date|distance|money
order or rank|other number|percent|period of time|speed|temperature|size or volume|weight"""
VARIANTS: dict[str, dict[str, Any]] = {
    "commit b4119c1f": {}, "only names, centered": {"rounds": 0}, "last round 0.5": {"last": 0.5},
    "all rounds 0.4": {"keep": 0.4}, "all rounds 0.5": {"keep": 0.5}, "10 texts": {"least": 10},
    "20 texts": {"least": 20}, "last round 0.5, 10 texts": {"last": 0.5, "least": 10},
}  # fmt: skip


@torch.inference_mode()
def read_features(texts: Iterable[str], tokenizer: Any, model: Any) -> Array:
    """Return the normalized mean over the tokens of each text: [texts, hidden]."""
    tokens = (tokenizer(text, truncation=True, return_tensors="pt") for text in texts)
    means = torch.cat([model(**each).last_hidden_state.mean(dim=1) for each in tokens])
    return normalize(torch.layer_norm(means, means.shape[-1:]).numpy())


def fit(
    names: Array, texts: Array, keep: float = 0.3, last: float = 0, least: int = 0,
    temperature: float = 0.05, rounds: int = 20,
) -> tuple[Array, float, Array]:  # fmt: skip
    """Return prototypes, the fraction of texts that keep the class of the names, and their fit.

    The fit of a name is its cosine with the mean of its texts. Features are centered.
    """
    units, starts = normalize(texts), normalize(names)
    vectors, means, classes = starts, starts, [(units @ starts.T).argmax(axis=1)]
    for number in range(rounds):
        assigned = softmax(units @ vectors.T / temperature, axis=1)
        classes.append(assigned.argmax(axis=1))
        share = least / (least + assigned.sum(axis=0)[:, None])
        share = np.maximum(share, last if last and number == rounds - 1 else keep)
        means = normalize(assigned.T @ units)
        vectors = normalize(share * starts + (1 - share) * means)
    return vectors, float((classes[0] == classes[-1]).mean()), (means * starts).sum(axis=1)


def measure(names: Array, rows: Array, classes: Array, size: int, **options: Any) -> Array:
    """Return percentages: accuracy, agreement, confidence, its error (ECE), and poor names."""
    center = rows[HELD_OUT:][:size].mean(axis=0)
    tested, texts = rows[:HELD_OUT] - center, rows[HELD_OUT:][:size] - center
    vectors, agreement, fits = fit(names - names.mean(axis=0), texts, **options)
    scaled = vectors.T / np.linalg.norm(texts, axis=1).mean()
    means = [softmax(texts @ scaled / t, axis=1).max(axis=1).mean() for t in TEMPERATURES]
    chosen = TEMPERATURES[np.abs(np.array(means) - CONFIDENCE * agreement).argmin()]
    probabilities = softmax(tested @ scaled / chosen, axis=1)
    confidence = probabilities.max(axis=1)
    is_right = probabilities.argmax(axis=1) == classes[:HELD_OUT]
    error = np.abs(np.bincount((10 * confidence).astype(int), confidence - is_right)).sum()
    values = (is_right.mean(), agreement, confidence.mean(), error / HELD_OUT)
    return 100 * np.array([*values, (fits < MIN_FIT).mean()])


def main() -> None:
    """Print the means over splits of all variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="minilm")
    options = parser.parse_args()
    lines = (line.split(" ", 1) for line in options.file.read_text("latin-1").splitlines())
    fine = {text.strip(): label for label, text in lines}
    coarse = {text: label.partition(":")[0] for text, label in fine.items()}
    named = dict(zip(sorted({*fine.values()}), FINE.replace("\n", "|").split("|"), strict=True))
    tables = {"names": (WORDS, coarse), "questions": (QUESTIONS, coarse), "fine": (named, fine)}
    tables["codes"] = ({code: code for code in WORDS}, coarse)
    folder = find_model(options.model, revision=None).folder
    model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    rows = read_features(fine, *model)
    orders = [np.random.default_rng(seed).permutation(len(rows)) for seed in range(SPLITS)]
    print("variant | names | texts | accuracy | agreement | confidence | its error | poor names")
    for title, (table, labels) in tables.items():
        names = np.stack([read_features(t.split("|"), *model).mean(0) for t in table.values()])
        classes = np.array([[*table].index(label) for label in labels.values()])
        for size, (variant, changes) in product(POOLS, VARIANTS.items()):
            splits = [measure(names, rows[o], classes[o], size, **changes) for o in orders]
            print(variant, title, size, *np.mean(splits, axis=0).round(1), sep=" | ")


if __name__ == "__main__":
    main()
