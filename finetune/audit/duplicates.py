"""Rows that say the same: in the same words, most of them, or nearly the same to the encoder."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

from finetune.data.dataset import number_texts

Rows = NDArray[np.int64]

# Words of both over words of either, each by its rarity: a template's rare word tells texts apart.
MIN_SHARED_WORDS = 0.6
# Cosine of centred features; in TREC all pairs above it mean the same.
MIN_COSINE = 0.96
# All pairs of more rows would take minutes.
MAX_COMPARED_ROWS = 20_000
# Texts are compared that share two of their rarest words; of many such texts, the next in order.
RAREST_WORDS, NEXT_ROWS = 4, 12
MAX_WORDS = 200
PIECE = 200_000
BLOCK = 1_024


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows, the first above the second, with their similarity in 0..1: each [pairs]."""

    first: Rows
    second: Rows
    similarity: NDArray[np.float64]

    def groups(self, rows: int) -> Rows:
        """Return the number of each row's group, [rows]: rows in a pair share one."""
        graph = coo_matrix((np.ones(len(self.first)), (self.first, self.second)), (rows, rows))
        return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def find_near_duplicates(texts: pyarrow.Array, features: NDArray[np.float32] | None) -> Pairs:
    """Return pairs of rows whose texts are the same, have most words in common, or mean the same.

    Case, punctuation and the order of words do not matter. Of more than ``MAX_COMPARED_ROWS`` rows
    only words are compared.
    """
    _, distinct, own = np.unique(
        number_texts(pyarrow.chunked_array([texts])), return_index=True, return_inverse=True
    )
    repeats = np.flatnonzero(distinct[own] != np.arange(len(own)))
    words = weigh_words(texts.take(pyarrow.array(distinct)))
    parts = [_pairs_by_words(words)]
    if features is not None and len(distinct) <= MAX_COMPARED_ROWS:
        parts.append(_pairs_by_features(features[distinct]))
    low, high, similarity = map(np.concatenate, zip(*parts, strict=True))
    # Of a pair that is found in both ways, the higher similarity.
    order = np.lexsort((-similarity, high, low))
    low, high, similarity = low[order], high[order], similarity[order]
    is_new = np.diff(low * len(distinct) + high, prepend=-1) != 0
    first = np.concatenate([distinct[own[repeats]], distinct[low[is_new]]])
    second = np.concatenate([repeats, distinct[high[is_new]]])
    similarity = np.concatenate([np.ones(len(repeats)), similarity[is_new]])
    return Pairs(np.minimum(first, second), np.maximum(first, second), similarity)


def weigh_words(texts: pyarrow.Array) -> csr_matrix:
    """Return the words of each text, each once, with their rarity: [texts, words]."""
    plain = pc.replace_substring_regex(pc.utf8_lower(texts), "['\u2019]", "")
    # Scripts without spaces: each character counts as a word.
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


def _pairs_by_words(words: csr_matrix) -> tuple[Rows, Rows, NDArray[np.float64]]:
    texts = np.repeat(np.arange(words.shape[0]), np.diff(words.indptr))
    order = np.lexsort((words.indices, -words.data, texts))
    rank = np.arange(len(texts)) - words.indptr[texts]
    rarest = np.full((words.shape[0], RAREST_WORDS), -1, np.int64)
    is_rarest = rank < RAREST_WORDS
    rarest[texts[is_rarest], rank[is_rarest]] = words.indices[order][is_rarest]
    rarest[(rarest[:, 0] >= 0) & (rarest[:, 1] < 0), 1] = words.shape[1]  # of one word
    codes, owners = [], []
    for one, other in combinations(np.sort(rarest, axis=1).T, 2):
        has_both = np.flatnonzero((one >= 0) & (one < other))
        codes.append((one * (words.shape[1] + 1) + other)[has_both])
        owners.append(has_both)
    code, owner = np.concatenate(codes), np.concatenate(owners)
    order = np.lexsort((owner, code))
    code, owner = code[order], owner[order]
    candidates = []
    for step in range(1, NEXT_ROWS + 1):
        same = code[step:] == code[:-step]
        candidates.append(owner[:-step][same] * words.shape[0] + owner[step:][same])
    low, high = np.divmod(np.unique(np.concatenate(candidates)), max(words.shape[0], 1))
    total = np.asarray(words.sum(axis=1)).ravel()
    is_in = words.sign()
    shared = np.zeros(len(low))
    for start in range(0, len(low), PIECE):
        here = slice(start, start + PIECE)
        both = words[low[here]].multiply(is_in[high[here]])
        shared[here] = np.asarray(both.sum(axis=1)).ravel()
    similarity = shared / (total[low] + total[high] - shared)
    is_close = similarity >= MIN_SHARED_WORDS
    return low[is_close], high[is_close], similarity[is_close]


def _pairs_by_features(features: NDArray[np.float32]) -> tuple[Rows, Rows, NDArray[np.float64]]:
    unit = unit_rows(features)
    found = []
    for start in range(0, len(unit), BLOCK):
        cosines = unit[start : start + BLOCK] @ unit[start:].T
        low, high = np.nonzero(np.triu(cosines >= MIN_COSINE, 1))
        found.append((low + start, high + start, cosines[low, high].astype(np.float64)))
    low, high, similarity = map(np.concatenate, zip(*found, strict=True))
    return low, high, np.minimum(similarity, 1.0)


def unit_rows(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return centred features of norm 1, so that products are cosines: [rows, hidden]."""
    centred = features - features.mean(axis=0)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(norms, 1e-12), np.float32)
