"""Examples with labels and weights, padded on demand, and the batches that they form."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import BatchShapes
from finetune.tokenization.encode import EncodedTexts, Windows

Inputs = dict[str, torch.Tensor]
InputsOf = Callable[[NDArray[np.int64], int], Inputs]


@dataclass(frozen=True)
class ModelInputs:
    """Examples as model inputs: each is one sequence of tokens, or several windows.

    Args:
        inputs_of: Returns the keyword arguments of a forward pass for the indices of some
            sequences and a padded length: CPU tensors of shape [sequences, ...].
        lengths: Tokens of each sequence: int64 of shape [sequences].
        windows: Maps sequences to examples; None if each sequence is one example.
    """

    inputs_of: InputsOf
    lengths: NDArray[np.int64]
    windows: Windows | None = field(default=None, kw_only=True)

    @property
    def max_lengths(self) -> NDArray[np.int64]:
        """Tokens of the longest sequence of each example: int64 of shape [examples]."""
        if self.windows is None:
            return self.lengths
        return np.maximum.reduceat(self.lengths, self.windows.firsts)

    def sequences_of(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of all sequences of some examples."""
        return self.windows.of(examples) if self.windows else examples

    def subset(self, sequences: NDArray[np.int64]) -> "ModelInputs":
        """Return some sequences, in this order, each as one example."""
        return ModelInputs(
            lambda indices, padded_length: self.inputs_of(sequences[indices], padded_length),
            self.lengths[sequences],
        )

    def average(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of examples from the logits of all sequences."""
        return self.windows.average(logits) if self.windows else logits


@dataclass(frozen=True)
class Examples(ModelInputs):
    """Examples with labels for the loss of the task, of shape [examples, ...].

    ``weights`` has the weight of each example in the loss: float32 of shape [examples].
    """

    labels: NDArray[Any]
    weights: NDArray[np.float32]
    truncated_texts: int = field(default=0, kw_only=True)

    def select(self, rows: NDArray[np.int64]) -> "Examples":
        """Return some of the examples, in this order; the share of truncated texts stays."""
        inputs, windows = self.subset(self.sequences_of(rows)), self.windows
        return Examples(
            inputs.inputs_of,
            inputs.lengths,
            self.labels[rows],
            self.weights[rows],
            windows=windows and Windows(windows.counts[rows]),
            truncated_texts=round(self.truncated_texts * len(rows) / len(self.labels)),
        )

    def followed_by(self, others: "Examples") -> "Examples":
        """Return these examples and then others."""
        count, windows = len(self.lengths), self.windows

        def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
            is_other = indices >= count
            ours = self.inputs_of(indices[~is_other], padded_length)
            theirs = others.inputs_of(indices[is_other] - count, padded_length)
            places = torch.from_numpy(np.argsort(np.argsort(is_other, kind="stable")))
            return {name: torch.cat([ours[name], theirs[name]])[places] for name in ours}

        if windows and others.windows:
            windows = Windows(np.concatenate([windows.counts, others.windows.counts]))
        return Examples(
            inputs_of,
            np.concatenate([self.lengths, others.lengths]),
            np.concatenate([self.labels, others.labels]),
            np.concatenate([self.weights, others.weights]),
            windows=windows,
            truncated_texts=self.truncated_texts + others.truncated_texts,
        )

    def without_windows(self) -> "Examples":
        """Return each window as one example, with the label of its text."""
        if self.windows is None:
            return self
        texts = np.repeat(np.arange(len(self.labels)), self.windows.counts)
        labels, weights = self.labels[texts], self.weights[texts]
        return replace(self, labels=labels, weights=weights, windows=None)


def inputs_of_texts(texts: EncodedTexts, *, takes_4d_mask: bool) -> ModelInputs:
    """Return encoded texts as a model reads them, with a mask as ``prepare_mask`` makes it."""

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        tensors = collate(texts, indices, padded_length=padded_length)
        return prepare_mask(tensors, takes_4d_mask=takes_4d_mask)

    return ModelInputs(inputs_of, texts.lengths, windows=texts.windows)


def collate(texts: EncodedTexts, indices: NDArray[np.int64], *, padded_length: int) -> Inputs:
    """Return the texts of some indices, padded to one length, as tensors on the CPU."""
    arrays = texts.padded(indices, padded_length=padded_length)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def prepare_mask(tensors: Inputs, *, takes_4d_mask: bool) -> Inputs:
    """Convert a bool mask [examples, tokens] to a form that needs no synchronization."""
    mask = tensors["attention_mask"]
    prepared = mask[:, None, None, :] if takes_4d_mask else mask.long()
    return {**tensors, "attention_mask": prepared}


def fill_batch(indices: NDArray[np.int64], *, batch_size: int) -> NDArray[np.int64]:
    """Repeat the last index until the batch is full; its result is dropped, its loss has no weight.

    An example with only padding would do harm: attention over no tokens is NaN on MPS
    (pytorch#156707).
    """
    return np.concatenate([indices, np.repeat(indices[-1:], batch_size - len(indices))])


# Examples are sorted by length only within a pool of this many batches, so that texts of one length
# meet others in every epoch. On TREC at batch size 32, 97% of the tokens are real with pools of 50
# (docs/measurements.md#padding-and-operations).
BATCHES_PER_POOL = 50
# With this few padded lengths, each has many texts in random order, so the epoch is one pool.
FEW_PADDED_LENGTHS = 16


@dataclass(frozen=True)
class Batch:
    """Examples that go through the model together: ``indices`` is int64 of shape [examples].

    If the examples have to share one loss, ``parts`` of them have their own padded lengths, and go
    through the model one after the other.
    """

    indices: NDArray[np.int64]
    padded_length: int
    parts: Sequence[tuple[int, int]] = ()


def choose_padded_lengths(lengths: NDArray[np.int64], shapes: BatchShapes) -> list[int]:
    """Return the padded lengths, ascending, that need the fewest tokens in total."""
    present, texts = np.unique(lengths, return_counts=True)
    allowed = [shapes.padded_length(tokens) for tokens in present.tolist()]
    padded, groups = np.unique(allowed, return_inverse=True)
    if shapes.max_shapes is None or len(padded) <= shapes.max_shapes:
        return [int(tokens) for tokens in padded]
    weights = np.bincount(groups, texts).astype(np.float64)
    return _fewest_tokens(padded, weights, count=shapes.max_shapes)


def _fewest_tokens(
    lengths: NDArray[np.int64], weights: NDArray[np.float64], *, count: int
) -> list[int]:
    """Choose ``count`` of more lengths, by dynamic programming over where each group starts.

    Other texts are padded to the next chosen length.
    """
    before = np.concatenate([[0.0], np.cumsum(weights)])
    # fewest[i] is the fewest tokens for the first i lengths. Each round allows one more length.
    fewest = np.concatenate([[0.0], np.full(len(lengths), np.inf)])
    rounds = []
    for _ in range(count):
        tokens, starts = [np.inf], [0]
        for end, longest in enumerate(lengths, start=1):
            totals = fewest[:end] + longest * (before[end] - before[:end])
            starts.append(int(totals.argmin()))
            tokens.append(totals[starts[-1]])
        fewest = np.array(tokens)
        rounds.append(starts)
    chosen, end = [], len(lengths)
    for starts in reversed(rounds):
        chosen.append(int(lengths[end - 1]))
        end = starts[end]
    return chosen[::-1]


def plan_epoch(
    lengths: NDArray[np.int64],
    *,
    effective_batch_size: int,
    padded_lengths: Sequence[int],
    seed: int,
    epoch: int,
) -> list[Batch]:
    """Group the examples of one epoch into effective batches of similar lengths, in random order.

    Every example occurs once. The last batch may be smaller. It gets the shortest examples, because
    devices may fill it up. The plan depends only on the arguments, so a resumed run continues at
    the same place. ``lengths`` has shape [examples], ``padded_lengths`` ascend, epochs start at 0.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    padded = np.asarray(padded_lengths)[np.searchsorted(padded_lengths, lengths)]
    is_one_pool = len(padded_lengths) <= FEW_PADDED_LENGTHS
    pool_size = len(order) if is_one_pool else effective_batch_size * BATCHES_PER_POOL
    pools = np.arange(len(order)) // pool_size
    by_length = order[np.lexsort((-padded[order], pools))]
    slices = np.split(by_length, range(effective_batch_size, len(order), effective_batch_size))
    batches = [Batch(indices, int(padded[indices].max())) for indices in slices]
    return [batches[index] for index in random.permutation(len(batches))]


def longest_first(batches: Sequence[Batch]) -> list[Batch]:
    """Move a longest batch to the front, so that memory runs out early or never."""
    longest = max(range(len(batches)), key=lambda index: batches[index].padded_length)
    return [batches[longest], *batches[:longest], *batches[longest + 1 :]]


def plan_evaluation(
    lengths: NDArray[np.int64],
    *,
    batch_size: int,
    padded_lengths: Sequence[int],
    shapes: BatchShapes | None = None,
) -> list[Batch]:
    """Group examples by length, longest first, so that memory runs out early or never.

    With ``shapes``, batches have the size with which frozen layers are fastest on the device.
    """
    left, size = np.argsort(-lengths, kind="stable"), batch_size
    batches: list[Batch] = []
    while len(left):
        padded_length = padded_lengths[bisect_left(padded_lengths, lengths[left[0]])]
        if shapes:
            size = shapes.extraction_examples(batch_size, padded_length=padded_length)
        batches.append(Batch(left[:size], padded_length))
        left = left[size:]
    return batches
