"""The token ids of a split: those of many texts are stored, and each process encodes a share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

from finetune.config.schema import Config, ModelConfig
from finetune.data.check import suggest_model
from finetune.data.dataset import TextColumns, column_of, texts_of, update_with_texts
from finetune.distributed.processes import ALONE, Processes
from finetune.events import Advance, Emit, Info, WarningMessage, ignore
from finetune.model.load import TextModel
from finetune.model.tensor_store import TensorStore, key_of
from finetune.runs.cache import open_tensor_store
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.examples import Examples, join_inputs

# Fewer take a second or two.
MANY_TEXTS = 50_000
# Of texts. What is not written yet is held in memory.
PART_BYTES = 2**24


def encode_rows(
    rows: Dataset,
    split: str,
    text_model: TextModel,
    *,
    config: Config,
    emit: Emit,
    processes: Processes = ALONE,
) -> Examples:
    """Encode the texts of a split, with a warning if some are truncated.

    Each of several processes calls this with the same rows.
    """
    texts = texts_of(rows)
    if len(rows) < MANY_TEXTS or not config.cache.feature_cache:
        encoded = [_encode(texts, text_model, config.model, emit=emit)]
    else:
        encoded = _Parts.of(texts, split, text_model, config, emit).read_or_encode(processes)
    labels = text_model.task.labels(column_of(rows, "label"))
    inputs = join_inputs([text_model.inputs(part) for part in encoded])
    examples = Examples(
        inputs_of=inputs.inputs_of,
        lengths=inputs.lengths,
        windows=inputs.windows,
        labels=labels,
        weights=text_model.task.example_weights(labels),
        truncated_texts=sum(part.truncated_texts for part in encoded),
    )
    remedies = _remedies(text_model, config.model, reads_pairs=texts.pairs is not None)
    _report_long_texts(examples, split, remedies, emit=emit)
    unknown_tokens = sum(part.count(text_model.tokenizer.unk_token_id) for part in encoded)
    found = suggest_model(unknown_tokens=unknown_tokens, tokens=int(examples.lengths.sum()))
    if found and split == "train":
        emit(WarningMessage(found.finding, remedy=found.remedy))
    return examples


def _encode(
    texts: TextColumns, text_model: TextModel, options: ModelConfig, *, emit: Emit = ignore
) -> EncodedTexts:
    return text_model.encode(
        *texts, max_length=options.max_length, long_texts=options.long_text_handling, emit=emit
    )


def _cut(texts: TextColumns) -> list[TextColumns]:
    """Cut texts into parts of about ``PART_BYTES``, wherever they are read."""
    sizes = sum(pc.binary_length(column).to_numpy().astype(np.int64) for column in texts.columns)
    starts = np.flatnonzero(np.diff(np.cumsum(sizes) // PART_BYTES)) + 1
    return [texts.slice(*ends) for ends in pairwise([0, *starts.tolist(), len(texts.texts)])]


@dataclass(frozen=True)
class _Parts:
    """Texts in parts, each of which is an entry of the store."""

    parts: Sequence[TextColumns]
    text_model: TextModel
    options: ModelConfig
    store: TensorStore
    notes: dict[str, Any]
    emit: Emit

    @classmethod
    def of(
        cls, texts: TextColumns, split: str, text_model: TextModel, config: Config, emit: Emit
    ) -> "_Parts":
        options, store = config.model, open_tensor_store(config.cache)
        notes = {"model": options.model, "mode": "token ids", "data": config.data.data}
        return cls(_cut(texts), text_model, options, store, notes | {"split": split}, emit)

    def read_or_encode(self, processes: Processes) -> list[EncodedTexts]:
        """Return the token ids of each part.

        Each process encodes a contiguous share and then reads those of the others. What another
        could not write to a store that both see is encoded here as well.
        """
        numbers = range(len(self.parts))
        own = numbers[processes.slice(len(numbers))]
        keys = [*chain.from_iterable(processes.gather([self._key(number) for number in own]))]
        rows = [len(part.texts) for part in self.parts]
        self.emit(Info(f"encoding {sum(rows):,} {self.notes['split']} texts, but for those stored"))
        found: dict[int, EncodedTexts] = {}
        for number in own:
            found[number] = self._get(number, keys[number])
            self.emit(Advance(sum(rows[one] for one in found), sum(rows[one] for one in own)))
        processes.barrier()
        others = (number for number in numbers if number not in own)
        found |= {number: self._get(number, keys[number]) for number in others}
        return [found[number] for number in numbers]

    def _key(self, number: int) -> str:
        """Return a key of all that the token ids of a part depend on."""
        columns = self.parts[number].columns
        digest = hashlib.sha256()
        for column in columns:
            update_with_texts(digest, column)
        max_length = min(self.options.max_length, self.text_model.max_tokens)
        return key_of(
            [
                f"{len(columns)} columns {digest.hexdigest()}",
                f"tokenizer {self.text_model.source.tokenizer_sha256}",
                f"max_length {max_length}, {self.options.long_text_handling}",
                *(f"{name} {version(name)}" for name in ("tokenizers", "transformers")),
                f"finetune {version('finetune-mps')}",
            ]
        )

    def _get(self, number: int, key: str) -> EncodedTexts:
        """Return the token ids that the store has, mapped, or encode and store them."""
        parts = self.store.read(key, emit=self.emit)
        if parts is None:
            encoded = _encode(self.parts[number], self.text_model, self.options)
            tensors = {name: torch.from_numpy(one) for name, one in encoded.to_arrays().items()}
            try:
                parts = self.store.write(
                    key,
                    [tensors],
                    size_bytes=sum(one.nbytes for one in tensors.values()),
                    notes=self.notes | {"rows": len(self.parts[number].texts)},
                )
            except OSError as error:
                reason = f"can't be written to {self.store.folder} ({error.strerror})"
                remedy = "make room with finetune cache clear, or name a folder with --cache-dir"
                message = f"token ids {reason}: they stay in memory"
                self.emit(WarningMessage(message, remedy=remedy))
                return encoded
        empty = _encode(self.parts[number].slice(0, 0), self.text_model, self.options)
        found = empty.with_arrays({name: one.numpy() for name, one in parts[0].items()})
        self.text_model.check_ids(found)
        return found


def _remedies(text_model: TextModel, options: ModelConfig, *, reads_pairs: bool) -> list[str]:
    """Return what can be done about truncated texts."""
    can_be_longer = text_model.max_tokens > options.max_length
    return [
        *(["raise --max-length"] if can_be_longer else []),
        *([] if reads_pairs else ["read all of it with --long-texts windows"]),
    ]


def _report_long_texts(
    examples: Examples, split: str, remedies: Sequence[str], *, emit: Emit
) -> None:
    """Warn of texts that have lost tokens; say into how many windows others are cut."""
    longest = examples.lengths.max()
    if examples.windows:
        texts, windows = len(examples.windows.counts), len(examples.lengths)
        cut = np.count_nonzero(examples.windows.counts > 1)
        emit(
            Info(
                f"{cut:,} of the {texts:,} {split} texts ({cut / texts:.1%}) are longer than "
                f"{longest} tokens: {windows:,} windows in all"
            )
        )
    elif lost := examples.truncated_texts:
        texts = len(examples.lengths)
        emit(
            WarningMessage(
                f"{lost:,} of the {texts:,} {split} texts ({lost / texts:.1%}) are longer than "
                f"{longest} tokens and are truncated",
                remedy=f"if the rest matters, {' or '.join(remedies) or 'shorten them'}",
            )
        )
