"""BERT-base on a thousand questions, trained as the article did it and as ``finetune run`` does.

The article padded every row to 512 tokens and ran the whole model at every update. ``finetune run``
pads to the longest row of a batch, and computes the features of a frozen encoder once.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.bench.apple import text_batch
from finetune.bench.bert import (
    CLASSES,
    GIGAFLOPS_A_TOKEN,
    SEED,
    bert_base,
    bert_structure,
    repeat,
    texts_of,
)
from finetune.bench.workload import ModuleWorkload, Task, Workload
from finetune.devices.base import Device, place
from finetune.events import ignore
from finetune.model.feature_extractor import FeatureExtractor, split_frozen
from finetune.model.feature_store import FeatureStore
from finetune.model.features import FrozenLayers, with_features
from finetune.model.freeze import freeze_parameters, set_training
from finetune.model.mode import Mode
from finetune.tokenization.buckets import choose_padded_lengths, plan_epoch
from finetune.tokenization.examples import Examples, inputs_of_texts
from finetune.training.micro_batches import cut_batch
from finetune.training.schedule import Schedule
from finetune.training.training_state import Hyperparameters, prepare_training

TEXTS = 1000
MODES = (Mode("full"), Mode("classifier"))
ARTICLE_TOKENS = 512
ARTICLE_BATCH_SIZES = (1, 32, 64)
_ARTICLE_RATE = 5e-5
_BATCH_SIZE = 32
_FEATURES_BATCH_SIZE = 64
_STORE_BYTES = 2**30

FoundSizes = Mapping[str, Mapping[str, int]]
"""Batch sizes by device and mode."""


def training_workloads(
    lengths: Sequence[int], *, found: FoundSizes, is_quick: bool
) -> list[Workload]:
    """Return both ways, in both modes, the article's at each batch size.

    Args:
        lengths: Tokens of the texts.
        found: Batch sizes that ``find-batch`` found, to be timed as well.
        is_quick: Leaves out all but the smallest batch.
    """
    lengths = repeat(lengths, TEXTS).tolist()
    sizes = ARTICLE_BATCH_SIZES[:1] if is_quick else ARTICLE_BATCH_SIZES
    workloads: list[Workload] = []
    for mode in MODES:
        workloads += [_article(mode, lengths, rows) for rows in sizes]
        workloads += [
            _article(mode, lengths, by_mode[mode], device=device)
            for device, by_mode in found.items()
            if by_mode.get(mode, 1) not in sizes
        ]
        workloads.append(_run(mode, lengths))
    return workloads


def _article(
    mode: Mode, lengths: Sequence[int], rows: int, *, device: str | None = None
) -> ModuleWorkload:
    where = "" if device is None else f", found on {device}"
    # Below a classifier alone nothing needs a gradient: a forward, and next to nothing after it.
    forwards_a_step = 1 if mode == "classifier" else 3
    return ModuleWorkload(
        group="training",
        name=f"{mode}, {ARTICLE_TOKENS} tokens, batch {rows}{where}",
        rows=rows,
        least_rows=rows,
        phases=("training",),
        gigaflops=GIGAFLOPS_A_TOKEN * ARTICLE_TOKENS * forwards_a_step / 3,
        device=device,
        make=lambda: _freeze_as_article(bert_base(), mode),
        make_batch=lambda count: text_batch(
            repeat(lengths, count).tolist(), padded_length=ARTICLE_TOKENS
        ),
        make_optimizer=partial(torch.optim.AdamW, lr=_ARTICLE_RATE),
    )


def _freeze_as_article(model: PreTrainedModel, mode: Mode) -> nn.Module:
    if mode == "classifier":
        model.base_model.requires_grad_(False)
    return model


def _run(mode: Mode, lengths: Sequence[int]) -> Workload:
    tokens = float(np.mean(lengths))
    forwards_a_step = 1 if mode == "classifier" else 3
    return _Run(
        group="training",
        name=f"{mode}, as finetune run",
        rows=len(lengths),
        least_rows=_BATCH_SIZE,
        phases=("training",),
        gigaflops=GIGAFLOPS_A_TOKEN * tokens * forwards_a_step / 3,
        lengths=lengths,
        mode=mode,
    )


@dataclass(frozen=True, kw_only=True)
class _Run(Workload):
    """A step is a pass over its rows: the first of all texts."""

    lengths: Sequence[int]
    mode: Mode

    def build(self, device: Device) -> Task:
        return _RunTask(device, self.lengths, self.mode)


class _RunTask(Task):
    def __init__(self, device: Device, lengths: Sequence[int], mode: Mode) -> None:
        model, structure = bert_base(), bert_structure()
        freeze_parameters(model, structure, mode=mode)
        self._device, self._lengths = device, lengths
        self._takes_4d_mask = structure.takes_4d_mask
        extractor = split_frozen(model, takes_4d_mask=self._takes_4d_mask, pads_left=False)
        self._layers = extractor and self._place(extractor)
        self._training_state = prepare_training(
            extractor.trainable if extractor else model,
            head=structure.head,
            device=device,
            precision="fp32",
            hyperparameters=Hyperparameters(
                optimizer="adamw",
                schedule=Schedule(peak=_ARTICLE_RATE, warmup_updates=0, total_updates=1),
                head_lr_multiplier=1.0,
                weight_decay=0.01,
                max_grad_norm=1.0,
            ),
        )

    def load(self, rows: int) -> None:
        texts = texts_of(self._lengths[:rows])
        inputs = inputs_of_texts(texts, takes_4d_mask=self._takes_4d_mask)
        labels = np.arange(rows) % CLASSES
        weights = np.ones(rows, np.float32)
        self._examples = Examples(inputs.inputs_of, inputs.lengths, labels, weights)
        lengths = np.array(self._lengths)
        self._padded_lengths = choose_padded_lengths(lengths, self._device.shapes)
        self._device.choose_attention(longest_tokens=self._padded_lengths[-1])

    def step(self) -> None:
        examples = self._with_features() if self._layers else self._examples
        set_training(self._training_state.model)
        for batch in plan_epoch(
            examples.lengths,
            effective_batch_size=_BATCH_SIZE,
            padded_lengths=self._padded_lengths,
            seed=SEED,
            epoch=0,
        ):
            micro_batches = cut_batch(examples, batch, batch_size=_BATCH_SIZE, device=self._device)
            self._training_state.update(0, micro_batches)

    def evaluate(self) -> None:
        raise NotImplementedError("inference is a group of its own")

    def _place(self, extractor: FeatureExtractor) -> FrozenLayers:
        place(extractor.model, self._device.torch_device)
        # In an empty store any key will do.
        return FrozenLayers(extractor, "", self._device, "fp32", self._takes_4d_mask)

    def _with_features(self) -> Examples:
        assert self._layers
        with tempfile.TemporaryDirectory() as folder:
            return with_features(
                self._examples,
                self._layers,
                FeatureStore(Path(folder), limit_bytes=_STORE_BYTES),
                padded_lengths=self._padded_lengths,
                batch_size=_FEATURES_BATCH_SIZE,
                notes={"split": "train"},
                emit=ignore,
            )
