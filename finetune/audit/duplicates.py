"""Finds near duplicates: texts that share most words or have nearly the same features."""

from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

from finetune.data.dataset import number_texts
from finetune.training.linear_head import normalize

Rows = NDArray[np.int64]

# Shared words divided by all words of both texts, weighted by rarity, so that a rare word in a
# template distinguishes texts.
MIN_SHARED_WORDS = 0.6
# Cosine of centered features. In TREC, all pairs above it have the same meaning.
MIN_COSINE = 0.96
# Comparing features of more rows would take minutes.
MAX_COMPARED_ROWS = 20_000
# Only words in at most this fraction or number of texts are used to find similar texts.
RARE_FRACTION, RARE_ROWS = 0.01, 200
MAX_WORDS = 200
BLOCK = 1_024


class Pairs(NamedTuple):
    """Row pairs, the first row above the second, with similarities in 0..1: each [pairs]."""

    first: Rows
    second: Rows
    similarity: NDArray[np.float64]

    def groups(self, rows: int) -> Rows:
        """Return a group number per row: [rows]. The rows of a pair are in the same group."""
        graph = coo_matrix((np.ones(len(self.first)), (self.first, self.second)), (rows, rows))
        return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def find_near_duplicates(texts: pyarrow.Array, features: NDArray[np.float32]) -> Pairs:
    """Find pairs of rows whose texts are equal, share most words, or mean the same.

    Ignore case, punctuation and word order. Compare features for at most
    ``MAX_COMPARED_ROWS`` rows.
    """
    numbers = number_texts(pyarrow.chunked_array([texts]))
    _, distinct, number = np.unique(numbers, return_index=True, return_inverse=True)
    repeat_of = distinct[number]
    repeats = np.flatnonzero(repeat_of != np.arange(len(texts)))
    pairs = [_pairs_by_words(_weigh_words(texts.take(pyarrow.array(distinct))))]
    if len(distinct) <= MAX_COMPARED_ROWS:
        pairs.append(_pairs_by_features(features[distinct]))
    low = np.concatenate([repeat_of[repeats], *(distinct[part.first] for part in pairs)])
    high = np.concatenate([repeats, *(distinct[part.second] for part in pairs)])
    similarity = np.concatenate([np.ones(len(repeats)), *(part.similarity for part in pairs)])
    # Pairs found by both keep the higher similarity.
    order = np.lexsort((-similarity, np.maximum(low, high), np.minimum(low, high)))
    first, second = np.minimum(low, high)[order], np.maximum(low, high)[order]
    is_new = np.diff(first * len(texts) + second, prepend=-1) != 0
    return Pairs(first[is_new], second[is_new], similarity[order][is_new])


def _weigh_words(texts: pyarrow.Array) -> csr_matrix:
    """Weigh the distinct words of each text by rarity: [texts, words]."""
    plain = pc.replace_substring_regex(pc.utf8_lower(texts), "['\u2019]", "")
    # In scripts without spaces, each character is a word.
    scripts = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}])"
    spaced = pc.replace_substring_regex(plain, scripts, r" \1 ")
    lists = pc.list_slice(pc.split_pattern_regex(spaced, r"[^\p{L}\p{M}\p{N}]+"), 0, MAX_WORDS)
    words, rows = lists.flatten(), pc.list_parent_indices(lists)
    is_word = pc.not_equal(words, "")
    codes = words.filter(is_word).dictionary_encode().indices.to_numpy().astype(np.int64)
    shape = (len(texts), int(codes.max(initial=0)) + 1)
    pairs = np.unique(rows.filter(is_word).to_numpy() * shape[1] + codes)
    rows, codes = pairs // shape[1], pairs % shape[1]
    rarity = np.log1p(shape[0] / np.maximum(np.bincount(codes, minlength=shape[1]), 1))
    return csr_matrix((rarity[codes], (rows, codes)), shape)


def _pairs_by_words(words: csr_matrix) -> Pairs:
    total, has_word = np.asarray(words.sum(axis=1)).ravel(), words.sign()
    frequency = np.bincount(words.indices, minlength=words.shape[1])
    rare = words[:, frequency <= max(RARE_FRACTION * len(total), RARE_ROWS)].sign()
    count = np.diff(rare.indptr)
    pairs = []
    for start in range(0, len(total), BLOCK):
        shared = (rare[start : start + BLOCK] @ rare.T).tocoo()
        low, high = shared.row + start, shared.col.astype(np.int64)
        # Compute the exact similarity if half of the rare words are shared.
        is_likely = (low < high) & (3 * shared.data >= count[low] + count[high])
        low, high = low[is_likely], high[is_likely]
        both = np.asarray(words[low].multiply(has_word[high]).sum(axis=1)).ravel()
        similarity = both / (total[low] + total[high] - both)
        is_close = similarity >= MIN_SHARED_WORDS
        pairs.append((low[is_close], high[is_close], similarity[is_close]))
    return Pairs(*map(np.concatenate, zip(*pairs, strict=True)))


def _pairs_by_features(features: NDArray[np.float32]) -> Pairs:
    unit = normalize_rows(features)
    pairs = []
    for start in range(0, len(unit), BLOCK):
        cosines = unit[start : start + BLOCK] @ unit[start:].T
        low, high = np.nonzero(np.triu(cosines >= MIN_COSINE, 1))
        pairs.append((low + start, high + start, cosines[low, high].astype(np.float64)))
    low, high, similarity = map(np.concatenate, zip(*pairs, strict=True))
    return Pairs(low, high, np.minimum(similarity, 1.0))


def normalize_rows(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Center features and scale them to norm 1, so that products are cosines: [rows, hidden]."""
    return normalize(features - features.mean(axis=0))
