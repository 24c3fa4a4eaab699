"""Workloads for timing devices: published networks, and optionally a model of the user."""

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import PreTrainedModel, ResNetConfig, ResNetForImageClassification

from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.bench import Group, Phase
from finetune.bench.results import ARTICLE_TEXTS, ARTICLE_TOKENS, Row
from finetune.config.mode import Mode
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.devices.base import Device
from finetune.events import muted
from finetune.model.factory import load_factory, loss_of
from finetune.model.freeze import set_training
from finetune.model.shape import random_classifier
from finetune.model.tensor_store import TensorStore
from finetune.runs.features import with_features
from finetune.tokenization.buckets import choose_padded_lengths, plan_epoch
from finetune.tokenization.encode import EncodedTexts, random_texts
from finetune.tokenization.examples import Examples, inputs_of_texts
from finetune.training.micro_batches import move_batches

CLASSES = 6
SEED = 0
# Measured with the tokenizer of BERT, which may not be available here. It produces 13.4 tokens per
# row for the first thousand rows of TREC, 13.0 for the bundled questions.
_CHARACTERS_PER_TOKEN = 4.4
_SPECIAL_TOKENS = 2
MLP_WIDTHS = (1024, 512, 256)
# Channels of VGG16's convolutions of 3 by 3; 0 halves the image.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_PIXELS = 224
_IMAGE_CLASSES = 1000
# An assumption: Apple did not publish the lengths of its texts.
_APPLE_TOKENS = 128
_ARTICLE_BATCH_SIZES = (1, 32, 64)
_LEARNING_RATE = 5e-5
_BATCH_SIZE = 32

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""A training step on some rows, or computing their logits without gradients."""
MakeSteps = Callable[[int], Steps]
"""Prepares this many rows, and returns the steps on them."""


@dataclass(frozen=True)
class Workload:
    """A network with data, to time devices.

    If a step takes too long or too much memory, fewer rows are timed, but at least ``min_rows``.
    """

    group: str
    name: str
    build: Callable[[Device], MakeSteps]
    rows: int
    min_rows: int = 1
    phases: tuple[Phase, ...] = ("training", "evaluation")

    def row(self, phase: Phase, device: str) -> Row:
        """Return a row of it without timings."""
        return Row(group=self.group, workload=self.name, phase=phase, device=device, rows=self.rows)


def list_workloads(
    groups: Sequence[Group], *, model: str | None, lengths: Sequence[int], is_quick: bool
) -> list[Workload]:
    """Return the workloads of groups, then the user's ``model``. ``lengths`` are text lengths."""
    makers: Mapping[Group, Callable[[], list[Workload]]] = {
        "mlp": mlp_workloads,
        "inference": partial(inference_workloads, lengths, is_quick=is_quick),
        "training": partial(training_workloads, lengths, is_quick=is_quick),
        "apple": apple_workloads,
    }
    workloads = [workload for group in groups for workload in makers[group]()]
    if model is not None:
        _, batch = load_factory(model)
        tensors = (
            part for part in tree_iter(batch) if isinstance(part, torch.Tensor) and part.ndim
        )
        rows = len(next(tensors, [None]))
        build = build_module(lambda: load_factory(model)[0], lambda _: batch)
        workloads.append(Workload("own", model, build, rows, min_rows=rows))
    return workloads


def build_module(
    make: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Callable[[Device], MakeSteps]:
    """Return what builds a module; without an optimizer a step is a forward and a backward."""

    def build(device: Device) -> MakeSteps:
        module = make().to(device.torch_device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer else None

        def make_steps(rows: int) -> Steps:
            device.choose_attention(longest_tokens=None)
            batch = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(device.torch_device), dict(make_batch(rows))
            )

            def train() -> None:
                module.train()
                module.zero_grad(set_to_none=True)
                loss_of(module(**batch)).backward()  # type: ignore[no-untyped-call]
                if optimizer:
                    optimizer.step()

            def evaluate() -> None:
                module.eval()
                with torch.inference_mode():
                    module(**batch)

            return {"training": train, "evaluation": evaluate}

        return make_steps

    return build


def mlp_workloads() -> list[Workload]:
    """Return the network as published, and with its widths times 4 and 16."""

    def workload(widths: list[int]) -> Workload:
        build = build_module(
            lambda: make_mlp(widths), lambda rows: {"input": torch.randn(rows, widths[0])}
        )
        return Workload("mlp", "-".join(map(str, widths)), build, 1024, phases=("training",))

    return [workload([*(scale * width for width in MLP_WIDTHS), 10]) for scale in (1, 4, 16)]


def make_mlp(widths: list[int]) -> nn.Module:
    """Return linear layers of these widths, with ReLU between them."""
    pairs = ((nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths))
    *layers, _ = (layer for pair in pairs for layer in pair)
    return nn.Sequential(*layers)


def apple_workloads() -> list[Workload]:
    """Return ResNet-50 with 128 rows per step, BERT-base and VGG16 with 64."""

    def images(rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, _PIXELS, _PIXELS)

    def labelled_images(rows: int) -> Batch:
        return {"pixel_values": images(rows), "labels": torch.arange(rows) % _IMAGE_CLASSES}

    texts = partial(_text_batch, [_APPLE_TOKENS])
    sgd = partial(torch.optim.SGD, lr=1e-3)
    vgg16 = build_module(make_vgg16, lambda rows: {"input": images(rows)}, sgd)
    return [
        Workload("apple", "ResNet-50", build_module(make_resnet50, labelled_images, sgd), 128),
        Workload("apple", "BERT-base", build_module(bert_base, texts, sgd), 64),
        Workload("apple", "VGG16", vgg16, 64),
    ]


def make_resnet50() -> nn.Module:
    """Return ResNet-50, with the default config of transformers."""
    config = ResNetConfig()
    config.num_labels = _IMAGE_CLASSES
    return ResNetForImageClassification(config)


def make_vgg16() -> nn.Module:
    """Return VGG16, without batch normalization."""
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG16:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    layers += [nn.Flatten(), nn.Linear(512 * (_PIXELS // 32) ** 2, 4096), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, _IMAGE_CLASSES)]
    return nn.Sequential(*layers)


def _text_batch(lengths: Sequence[int], rows: int, *, padded_length: int | None = None) -> Batch:
    """Return texts of these lengths for BERT, by default padded to the longest."""
    tokens = torch.from_numpy(np.resize(lengths, rows))
    mask = (torch.arange(padded_length or int(tokens.max())) < tokens[:, None]).long()
    token_ids = mask * torch.randint(_random_bert().config.vocab_size, mask.shape)
    labels = torch.arange(rows) % CLASSES
    return {"input_ids": token_ids, "attention_mask": mask, "labels": labels}


def inference_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return the logits of BERT-base for a batch padded to its longest text, in powers of two."""
    build = build_module(bert_base, partial(_text_batch, lengths))
    return [
        Workload("inference", f"batch {rows}", build, rows, min_rows=rows, phases=("evaluation",))
        for rows in (2**power for power in range(5 if is_quick else 9))
    ]


def training_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return BERT-base trained on a thousand questions, as the article did it and as a run does.

    The article padded every row to 512 tokens and ran the whole model at every step. A run pads to
    the longest row of a batch, and computes the features of a frozen encoder once.
    """
    all_lengths = np.resize(lengths, ARTICLE_TEXTS)
    sizes = _ARTICLE_BATCH_SIZES[:1] if is_quick else _ARTICLE_BATCH_SIZES
    workloads = []
    for mode in (Mode("full"), Mode("classifier")):
        make_model = partial(_make_articles_model, mode)
        make_batch = partial(_text_batch, lengths, padded_length=ARTICLE_TOKENS)
        build = build_module(make_model, make_batch, partial(torch.optim.AdamW, lr=_LEARNING_RATE))
        for rows in sizes:
            name = f"{mode}, {ARTICLE_TOKENS} tokens, batch {rows}"
            workloads.append(Workload("training", name, build, rows))
        name, build = f"{mode}, as finetune run", partial(_build_run, mode, all_lengths)
        workloads.append(Workload("training", name, build, ARTICLE_TEXTS, min_rows=_BATCH_SIZE))
    return [replace(workload, phases=("training",)) for workload in workloads]


def _make_articles_model(mode: Mode) -> nn.Module:
    model = bert_base()
    model.base_model.requires_grad_(mode == "full")
    return model


def _build_run(mode: Mode, lengths: np.ndarray, device: Device) -> MakeSteps:
    """Return what makes a pass over the first rows ready, of a frozen encoder's features too."""
    case = Case(
        device.name,
        architecture_of(_random_bert().config.to_dict()),
        classes=CLASSES,
        mode=mode,
        padded_length=ARTICLE_TOKENS,
        part="whole" if mode == "full" else "features",
    )
    trial = build_trial_model(case, device=device)
    padded_lengths = choose_padded_lengths(lengths, device.shapes)

    def make_steps(rows: int) -> Steps:
        device.choose_attention(longest_tokens=padded_lengths[-1])
        inputs = inputs_of_texts(texts_of(lengths[:rows]), takes_4d_mask=trial.takes_4d_mask)
        labels, weights = np.arange(rows) % CLASSES, np.ones(rows, np.float32)

        def train() -> None:
            examples = Examples(inputs.inputs_of, inputs.lengths, labels, weights)
            if trial.frozen_layers:
                with tempfile.TemporaryDirectory() as folder:
                    examples = with_features(
                        examples, trial.frozen_layers, TensorStore(Path(folder), limit_bytes=2**30),
                        padded_lengths=padded_lengths, batch_size=64, split="train")  # fmt: skip
            batches = plan_epoch(
                examples.lengths, effective_batch_size=_BATCH_SIZE, padded_lengths=padded_lengths,
                seed=SEED, epoch=0,
            )  # fmt: skip
            set_training(trial.trainer.model)
            for _, cut in move_batches(examples, batches, device=device):
                trial.trainer.take_step(0, cut(_BATCH_SIZE))

        return {"training": train}

    return make_steps


def read_lengths(data_dir: Path | None) -> list[int]:
    """Return about the tokens of TREC's training rows, without a folder of the questions here."""
    data = DataConfig("trec", data_dir=str(data_dir)) if data_dir else DataConfig("questions")
    with muted():
        texts = load_data(data).splits["train"]["text"]
    return [_SPECIAL_TOKENS + round(len(text) / _CHARACTERS_PER_TOKEN) for text in texts]


def bert_base() -> PreTrainedModel:
    """Return BERT-base for six classes on the CPU, a new one with the same weights each time."""
    return copy.deepcopy(_random_bert())


@cache
def _random_bert() -> PreTrainedModel:
    return random_classifier("bert-base-uncased", classes=CLASSES, seed=SEED)


def texts_of(lengths: Sequence[int] | NDArray[np.int64]) -> EncodedTexts:
    """Return texts of random tokens for BERT, with these numbers of tokens."""
    return random_texts(
        np.asarray(lengths, np.int64),
        vocabulary_size=_random_bert().config.vocab_size,
        padding_id=0,
        seed=SEED,
    )
