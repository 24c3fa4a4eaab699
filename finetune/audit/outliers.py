"""Rows unlike the rest: far from every class, with the reason where one can be named."""

from collections.abc import Mapping

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.audit.duplicates import BLOCK, unit_rows, weigh_words

# Robust standard deviations above the median distance.
MIN_DEVIATIONS = 4.0
SAMPLE, NEAREST = 5_000, 5
# Of texts with so many words at least.
MIN_UNKNOWN, MIN_WORDS = 0.7, 3
MAX_ROWS = 200
# Something that more rows have is how this table is.
MAX_FRACTION = 0.02
REASONS: Mapping[str, str] = {
    "HTML or other markup": r"</?\w+[^<>]*>|&[a-z]+;|\{\{|\]\(http",
    "mostly an address": r"^\s*(https?://|www\.)\S+\s*$",
    "letters of another script": r"[^\x00-\x{24F}\p{P}\p{S}\p{Z}]{3}",
    "no letters": r"^\P{L}*$",
    "characters that were decoded wrongly": r"\x{FFFD}|Ã.|â€",
    "cut off": r"(\.\.\.|…)\s*$",
}


def find_outliers(
    texts: pyarrow.Array, features: NDArray[np.float32]
) -> tuple[NDArray[np.int64], list[float], list[str]]:
    """Return rows, how many deviations they are off, and why, if known; the farthest first.

    The distance is that to the nearest rows of a sample.
    """
    unit = unit_rows(features)
    sample = np.random.default_rng(0).permutation(len(unit))[:SAMPLE]
    distance = np.zeros(len(unit))
    nearest = min(NEAREST, len(sample) - 1)
    for start in range(0, len(unit) if nearest > 0 else 0, BLOCK):
        cosines = unit[start : start + BLOCK] @ unit[sample].T
        cosines[np.arange(start, start + len(cosines))[:, None] == sample] = -1
        best = np.partition(cosines, -nearest, axis=1)[:, -nearest:]
        distance[start : start + BLOCK] = 1 - best.mean(axis=1)
    middle = float(np.median(distance))
    spread = 1.4826 * float(np.median(np.abs(distance - middle)))
    deviations = (distance - middle) / max(spread, 1e-6)
    found = {
        reason: pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
        for reason, pattern in REASONS.items()
    }
    words = weigh_words(texts)
    counts, is_new = np.diff(words.indptr), words.copy()
    is_new.data = (words.data == words.data.max(initial=0)).astype(np.float64)
    unknown = np.asarray(is_new.sum(axis=1)).ravel() / np.maximum(counts, 1)
    is_foreign = (unknown >= MIN_UNKNOWN) & (counts >= MIN_WORDS)
    found["words of no other row: another language?"] = is_foreign
    reasons = np.full(len(unit), "", object)
    for reason, has in found.items():
        if has.sum() <= max(MAX_FRACTION * len(has), 1):
            reasons[has & (reasons == "")] = reason
    rows = np.flatnonzero((deviations >= MIN_DEVIATIONS) | (reasons != ""))
    rows = rows[np.argsort(-deviations[rows], kind="stable")][:MAX_ROWS]
    return rows, deviations[rows].tolist(), reasons[rows].tolist()
