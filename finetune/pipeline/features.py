"""What is frozen runs once: its states take the place of the texts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune import events, hub
from finetune.config.schema import CacheConfig, Config
from finetune.events import Advance, Emit, Stage
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs, split_frozen
from finetune.model.feature_store import FeatureStore, key_of
from finetune.model.load import Classifier
from finetune.model.mode import Mode
from finetune.pipeline.prepare import Prepared
from finetune.pipeline.trained import place
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs, InputsOf
from finetune.training.accelerator import Accelerator
from finetune.training.out_of_memory import BatchSize

ADVANCES = 10


def cache_folder(options: CacheConfig, name: str) -> Path:
    """Return the folder of one kind of files that are kept from run to run."""
    if options.cache_dir is None:
        return hub.cache_folder(name)
    return Path(options.cache_dir).expanduser() / name


def open_feature_store(options: CacheConfig) -> FeatureStore:
    """Return the store that a configuration names."""
    folder = cache_folder(options, "features")
    return FeatureStore(folder, limit_bytes=int(options.cache_gib * 2**30))


def caches_features(config: Config, mode: Mode) -> bool:
    """Return whether a part is frozen and is to run once, if it can be cut off."""
    return mode.freezes_layers and config.cache.feature_cache


def make_feature_extractor(classifier: Classifier) -> FeatureExtractor | None:
    """Return what is frozen of a classifier, or None if it can't be cut off."""
    return split_frozen(
        classifier.model,
        takes_4d_mask=classifier.structure.takes_4d_mask,
        pads_left=classifier.tokenizer.padding_side == "left",
    )


def extract_features(
    prepared: Prepared,
    examples: dict[str, Examples],
    *,
    padded_lengths: Sequence[int],
    batch_size: BatchSize,
    emit: Emit,
) -> tuple[nn.Module, dict[str, Examples]]:
    """Run what is frozen over all splits, or find what it gave before.

    Args:
        prepared: The run; its model goes to the device.
        examples: The splits as texts.
        padded_lengths: Padded lengths that a batch may have, ascending.
        batch_size: Rows in one forward; fewer after memory ran out.
        emit: Is told how far it has come.

    Returns:
        What is left of the model to run at every update, and the splits as it takes them. Where
        nothing is frozen, or the frozen part can't be cut off, the whole model and the same splits.
    """
    classifier = prepared.classifier
    if not caches_features(prepared.config, prepared.mode):
        return classifier.model, examples
    prefix = make_feature_extractor(classifier)
    if prefix is None:
        emit(
            events.WarningMessage(
                f"the frozen part of {type(classifier.model).__name__} can't be cut off and runs "
                "at every update"
            )
        )
        return classifier.model, examples
    # The key is made of what lies on the CPU.
    key = _frozen_key(prepared, prefix)
    place(classifier, prepared.device)
    store = open_feature_store(prepared.config.cache)
    frozen = _FrozenPass(prepared, prefix, key, store, padded_lengths, emit)
    with_states = {
        name: batch_size.fit(partial(frozen.with_states, name, split))
        for name, split in examples.items()
    }
    return prefix.trainable, with_states


def _frozen_key(prepared: Prepared, prefix: FeatureExtractor) -> str:
    """Return a key of all that the states depend on but the inputs."""
    # The names of the classes and of the folder change nothing.
    config = {**prefix.model.config.to_dict(), "id2label": 0, "label2id": 0, "_name_or_path": 0}
    ingredients = [
        f"cut {prefix.split_at}",
        f"precision {prepared.config.training.precision}",
        f"device {prepared.device.name} {prepared.device.description}",
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "finetune-mps")),
        f"config {sorted(config.items(), key=lambda item: item[0])}",
    ]
    tensors = (part for name_and_tensor in prefix.frozen_tensors() for part in name_and_tensor)
    return key_of((*ingredients, *tensors))


@dataclass(frozen=True)
class _FrozenPass:
    """Brings splits through what is frozen.

    Args:
        prepared: The run, its model on the device.
        prefix: What is frozen of it.
        key: Of all that the states depend on but the inputs.
        store: Where they are kept.
        padded_lengths: Padded lengths that a batch may have, ascending.
        emit: Is told how far it has come.
    """

    prepared: Prepared
    prefix: FeatureExtractor
    key: str
    store: FeatureStore
    padded_lengths: Sequence[int]
    emit: Emit

    def with_states(self, name: str, split: Examples, batch_size: int) -> Examples:
        """Return a split whose rows are states instead of texts, made of so many at once."""
        # The last bits of a row's states depend on the batch that it is in, so that the same texts
        # always come in the same batches.
        batches = plan_evaluation(
            split.lengths, batch_size=batch_size, padded_lengths=self.padded_lengths
        )
        inputs = (
            split.inputs_of(self._rows(batch, batch_size), batch.padded_length) for batch in batches
        )
        parts = (part for one in inputs for name in sorted(one) for part in (name, one[name]))
        key = key_of(chain([self.key], parts))
        lines = self.store.read(key, emit=self.emit)
        if lines is None:
            self.emit(Stage(f"running the frozen core once over {len(split.labels):,} {name} rows"))
            lines = self._keep(key, name, split, batches, batch_size)
        else:
            self.emit(
                Stage(f"reusing what the frozen core gave for {len(split.labels):,} {name} rows")
            )
        order = np.concatenate([batch.indices for batch in batches])
        maker = self._token_inputs if self.prefix.per_token else self._vector_inputs
        return replace(split, inputs_of=maker(split, lines, order))

    def _keep(
        self, key: str, name: str, split: Examples, batches: Sequence[Batch], batch_size: int
    ) -> torch.Tensor:
        notes = {
            "model": self.prepared.config.model.model,
            "mode": self.prepared.mode,
            "data": self.prepared.config.data.data,
            "split": name,
            "rows": len(split.labels),
        }
        vectors = split.lengths.sum() if self.prefix.per_token else len(split.labels)
        shape = (int(vectors), self.prefix.hidden_size)
        try:
            return self.store.write(
                key, self._pieces(split, batches, batch_size), shape=shape, notes=notes
            )
        except OSError as error:
            self.emit(
                events.WarningMessage(
                    f"what the frozen core gave can't be kept in {self.store.folder} "
                    f"({error.strerror}) and stays in memory",
                    remedy="make room with finetune cache clear, or name a folder with --cache-dir",
                )
            )
            return torch.cat(list(self._pieces(split, batches, batch_size)))

    def _pieces(
        self, split: Examples, batches: Sequence[Batch], batch_size: int
    ) -> Iterator[torch.Tensor]:
        """Yield each batch's states without padding, on the CPU."""
        device = self.prepared.device.torch_device
        autocast = Accelerator(
            self.prepared.device, precision=self.prepared.config.training.precision
        ).autocast
        step = math.ceil(len(batches) / ADVANCES)
        done = 0
        for number, batch in enumerate(batches, start=1):
            inputs = split.inputs_of(self._rows(batch, batch_size), batch.padded_length)
            with autocast():
                states = self.prefix.extract({name: one.to(device) for name, one in inputs.items()})
            rows = len(batch.indices)
            if self.prefix.per_token:
                mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:rows]
                yield states.cpu()[:rows][mask.bool()]
            else:
                yield states[:rows].cpu()
            done += rows
            if number % step == 0 or number == len(batches):
                self.emit(Advance(done, len(split.labels)))

    def _rows(self, batch: Batch, batch_size: int) -> NDArray[np.int64]:
        if not self.prepared.device.shapes.pads_batches:
            return batch.indices
        return fill_batch(batch.indices, batch_size=batch_size)

    def _vector_inputs(
        self, split: Examples, lines: torch.Tensor, order: NDArray[np.int64]
    ) -> InputsOf:
        line_of_row = np.argsort(order)
        takes_4d_mask = self.prepared.classifier.structure.takes_4d_mask

        def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
            states = lines[torch.from_numpy(line_of_row[rows])]
            return pooled_inputs(states, takes_4d_mask=takes_4d_mask)

        return inputs_of

    def _token_inputs(
        self, split: Examples, lines: torch.Tensor, order: NDArray[np.int64]
    ) -> InputsOf:
        starts = np.empty_like(order)
        starts[order] = np.cumsum(split.lengths[order]) - split.lengths[order]

        def inputs_of(rows: NDArray[np.int64], padded_length: int) -> Inputs:
            mask = split.inputs_of(rows, padded_length)["attention_mask"]
            lengths = split.lengths[rows]
            firsts = starts[rows] - (np.cumsum(lengths) - lengths)
            numbers = np.repeat(firsts, lengths) + np.arange(lengths.sum())
            states = lines.new_zeros(len(rows), padded_length, lines.shape[1])
            states[mask.reshape(len(rows), padded_length).bool()] = lines[torch.from_numpy(numbers)]
            return {"inputs_embeds": states, "attention_mask": mask}

        return inputs_of
