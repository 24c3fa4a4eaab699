"""BERT-base on a thousand questions, trained as the article did it and as ``finetune run`` does.

The article padded every row to 512 tokens and ran the whole model at every step. ``finetune run``
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

from finetune.bench.bert import (
    CLASSES,
    GIGAFLOPS_A_TOKEN,
    SEED,
    bert_base,
    bert_structure,
    repeat,
    text_batch,
    texts_of,
)
from finetune.bench.published import ARTICLE_TEXTS, ARTICLE_TOKENS
from finetune.bench.workload import Load, Steps, Workload, build_module
from finetune.config.mode import Mode
from finetune.devices.base import Device, place
from finetune.events import ignore
from finetune.model.feature_extractor import split_frozen
from finetune.model.features import FrozenLayers, with_features
from finetune.model.freeze import freeze_parameters, set_training
from finetune.model.tensor_store import TensorStore
from finetune.tasks.single import cross_entropy
from finetune.tokenization.buckets import choose_padded_lengths, plan_epoch
from finetune.tokenization.examples import Examples, inputs_of_texts
from finetune.training.micro_batches import move_batches
from finetune.training.schedule import Schedule
from finetune.training.training_state import Hyperparameters, TrainingState, prepare_training

MODES = (Mode("full"), Mode("classifier"))
_ARTICLE_BATCH_SIZES = (1, 32, 64)
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
    lengths = repeat(lengths, ARTICLE_TEXTS).tolist()
    sizes = _ARTICLE_BATCH_SIZES[:1] if is_quick else _ARTICLE_BATCH_SIZES
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
) -> Workload:
    def make_batch(count: int) -> Mapping[str, torch.Tensor]:
        return text_batch(repeat(lengths, count), padded_length=ARTICLE_TOKENS)

    where = "" if device is None else f", found on {device}"
    return Workload(
        group="training",
        name=f"{mode}, {ARTICLE_TOKENS} tokens, batch {rows}{where}",
        build=build_module(
            lambda: _make_article_model(mode),
            make_batch,
            partial(torch.optim.AdamW, lr=_ARTICLE_RATE),
        ),
        rows=rows,
        phases=("training",),
        gigaflops=_gigaflops(mode, tokens=ARTICLE_TOKENS),
        device=device,
    )


def _make_article_model(mode: Mode) -> nn.Module:
    model = bert_base()
    if mode == "classifier":
        model.base_model.requires_grad_(False)
    return model


def _run(mode: Mode, lengths: Sequence[int]) -> Workload:
    """Return a pass over the rows: the first of all texts."""
    return Workload(
        group="training",
        name=f"{mode}, as finetune run",
        build=partial(_build_run, mode, np.array(lengths)),
        rows=len(lengths),
        least_rows=_BATCH_SIZE,
        phases=("training",),
        gigaflops=_gigaflops(mode, tokens=float(np.mean(lengths))),
    )


def _gigaflops(mode: Mode, *, tokens: float) -> float:
    # Below a classifier alone nothing needs a gradient: a forward, and next to nothing after it.
    forwards_a_step = 1 if mode == "classifier" else 3
    return GIGAFLOPS_A_TOKEN * tokens * forwards_a_step / 3


def _build_run(mode: Mode, lengths: np.ndarray, device: Device) -> Load:
    model, structure = bert_base(), bert_structure()
    freeze_parameters(model, structure, mode=mode)
    extractor = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    training_state = prepare_training(
        extractor.trainable if extractor else model,
        head=structure.head,
        device=device,
        precision="fp32",
        losses=cross_entropy,
        hyperparameters=Hyperparameters(
            optimizer="adamw",
            schedule=Schedule(peak=_ARTICLE_RATE, warmup_steps=0, total_steps=1),
            head_lr_multiplier=1.0,
            weight_decay=0.01,
            max_grad_norm=1.0,
        ),
    )
    layers = None
    if extractor:
        place(extractor.model, device.torch_device)
        # In an empty store any key will do.
        layers = FrozenLayers(extractor, "", device, "fp32", structure.takes_4d_mask)
    padded_lengths = choose_padded_lengths(lengths, device.shapes)

    def load(rows: int) -> Steps:
        device.choose_attention(longest_tokens=padded_lengths[-1])
        inputs = inputs_of_texts(texts_of(lengths[:rows]), takes_4d_mask=structure.takes_4d_mask)
        labels, weights = np.arange(rows) % CLASSES, np.ones(rows, np.float32)
        examples = Examples(inputs.inputs_of, inputs.lengths, labels, weights)
        return {"training": _Pass(training_state, layers, examples, padded_lengths)}

    return load


@dataclass(frozen=True)
class _Pass:
    """An epoch; where layers are frozen, with the features that they give computed before."""

    training_state: TrainingState
    layers: FrozenLayers | None
    examples: Examples
    padded_lengths: Sequence[int]

    def __call__(self) -> None:
        examples = self._with_features(self.layers) if self.layers else self.examples
        batches = plan_epoch(
            examples.lengths,
            effective_batch_size=_BATCH_SIZE,
            padded_lengths=self.padded_lengths,
            seed=SEED,
            epoch=0,
        )
        set_training(self.training_state.model)
        for _, cut in move_batches(examples, batches, device=self.training_state.device):
            self.training_state.update(0, cut(_BATCH_SIZE))

    def _with_features(self, layers: FrozenLayers) -> Examples:
        with tempfile.TemporaryDirectory() as folder:
            return with_features(
                self.examples,
                layers,
                TensorStore(Path(folder), limit_bytes=_STORE_BYTES),
                padded_lengths=self.padded_lengths,
                batch_size=_FEATURES_BATCH_SIZE,
                notes={"split": "train"},
                emit=ignore,
            )
