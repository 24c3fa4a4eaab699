"""What devices are timed at: networks that others have published, and one of the user's own."""

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
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only
from transformers import PreTrainedModel, ResNetConfig, ResNetForImageClassification

from finetune.bench import Group, Phase
from finetune.bench.results import ARTICLE_TEXTS, ARTICLE_TOKENS, Row
from finetune.config.mode import Mode
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.devices.base import Device, place
from finetune.evaluation.predict import predict_logits
from finetune.events import ignore
from finetune.model.factory import load_factory, loss_of
from finetune.model.feature_extractor import split_frozen
from finetune.model.features import FrozenLayers, with_features
from finetune.model.freeze import freeze_parameters, set_training
from finetune.model.shape import random_classifier
from finetune.model.structure import Structure, find_structure
from finetune.model.tensor_store import TensorStore
from finetune.tasks.single import Single
from finetune.tokenization.buckets import choose_padded_lengths, plan_epoch
from finetune.tokenization.encode import EncodedTexts, random_texts
from finetune.tokenization.examples import Examples, collate, inputs_of_texts
from finetune.training.micro_batches import move_batches
from finetune.training.optimizers import Hyperparameters, Schedule
from finetune.training.step import prepare_training

CLASSES = 6
SEED = 0
# BERT's vocabulary cuts most words that are longer. Counted twice, they make 13.2 tokens a row of
# TREC's first thousand, where its tokenizer makes 13.4; of the questions 12.9 and 13.0.
_MAX_WHOLE_WORD = 8
_SPECIAL_TOKENS = 2
MODES = (Mode("full"), Mode("classifier"))
MLP_WIDTHS = (1024, 512, 256)
# Channels of VGG16's convolutions of 3 by 3; 0 halves the image.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_PIXELS = 224
_IMAGE_CLASSES = 1000
# Apple does not say how long its texts were.
_APPLE_TOKENS = 128
_ARTICLE_BATCH_SIZES = (1, 32, 64)
_LEARNING_RATE = 5e-5
_BATCH_SIZE = 32

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""What is timed: a step of training with some rows, or their logits, without gradients."""
Load = Callable[[int], Steps]
"""Makes so many rows ready, and what is done with them."""


@dataclass(frozen=True)
class Workload:
    """What devices are timed at.

    ``min_rows`` are the fewest that are timed where a step takes too long, or too much memory.
    """

    group: str
    name: str
    build: Callable[[Device], Load]
    rows: int
    min_rows: int = 1
    phases: tuple[Phase, ...] = ("training", "evaluation")

    def row(self, phase: Phase, device: str) -> Row:
        """Return a row of it without timings."""
        return Row(group=self.group, workload=self.name, phase=phase, device=device, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which workloads are timed; ``model`` names the user's own, ``lengths`` are those of texts."""

    groups: Sequence[Group]
    model: str | None
    lengths: Sequence[int]
    is_quick: bool


def list_workloads(selection: Selection) -> list[Workload]:
    """Return the selected workloads, group by group, the user's own last."""
    makers: Mapping[Group, Callable[[Selection], list[Workload]]] = {
        "mlp": mlp_workloads,
        "inference": inference_workloads,
        "training": training_workloads,
        "apple": apple_workloads,
    }
    chosen = [one for group in selection.groups for one in makers[group](selection)]
    if (name := selection.model) is not None:
        _, batch = load_factory(name)
        tensors = (one for one in tree_iter(batch) if isinstance(one, torch.Tensor) and one.ndim)
        rows = len(next(tensors, [None]))
        build = build_module(lambda: load_factory(name)[0], lambda _: batch)
        chosen.append(Workload("own", name, build, rows, min_rows=rows))
    return chosen


def build_module(
    make: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Callable[[Device], Load]:
    """Return what builds a module that is given a batch of keyword arguments.

    The loss is the output's, or the sum of its floating-point tensors. Without an optimizer a step
    is a forward and a backward.
    """

    def build(device: Device) -> Load:
        module = make().to(device.torch_device)
        trained = [one for one in module.parameters() if one.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer else None

        def load(rows: int) -> Steps:
            device.choose_attention(longest_tokens=None)
            batch = tree_map_only(
                torch.Tensor, lambda one: one.to(device.torch_device), dict(make_batch(rows))
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

        return load

    return build


def mlp_workloads(_: Selection) -> list[Workload]:
    """Return the network as published, and with its widths times 4 and 16."""

    def workload(widths: list[int]) -> Workload:
        build = build_module(
            lambda: make_mlp(widths), lambda rows: {"input": torch.randn(rows, widths[0])}
        )
        return Workload("mlp", "-".join(map(str, widths)), build, 1024, phases=("training",))

    return [workload([*(scale * width for width in MLP_WIDTHS), 10]) for scale in (1, 4, 16)]


def make_mlp(widths: list[int]) -> nn.Module:
    """Return linear layers of these widths, with ReLU between them."""
    pairs = ((nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(widths))
    *layers, _ = (layer for pair in pairs for layer in pair)
    return nn.Sequential(*layers)


def apple_workloads(_: Selection) -> list[Workload]:
    """Return ResNet-50 with 128 rows a step, BERT-base and VGG16 with 64."""

    def images(rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, _PIXELS, _PIXELS)

    def labelled_images(rows: int) -> Batch:
        return {"pixel_values": images(rows), "labels": torch.arange(rows) % _IMAGE_CLASSES}

    def texts(rows: int) -> Batch:
        return _text_batch([_APPLE_TOKENS] * rows, padded_length=_APPLE_TOKENS)

    sgd = partial(torch.optim.SGD, lr=1e-3)
    vgg16 = build_module(make_vgg16, lambda rows: {"input": images(rows)}, sgd)
    return [
        Workload("apple", "ResNet-50", build_module(make_resnet50, labelled_images, sgd), 128),
        Workload("apple", "BERT-base", build_module(bert_base, texts, sgd), 64),
        Workload("apple", "VGG16", vgg16, 64),
    ]


def make_resnet50() -> nn.Module:
    """Return ResNet-50: its widths and depths are those of transformers' own config."""
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


def _text_batch(lengths: Sequence[int], *, padded_length: int) -> Batch:
    """Return texts as transformers' BERT takes them: token ids, mask of 1 and 0, classes."""
    rows = np.arange(len(lengths))
    batch = collate(texts_of(lengths), rows, padded_length=padded_length)
    labels = torch.from_numpy(rows % CLASSES)
    return {**batch, "attention_mask": batch["attention_mask"].long(), "labels": labels}


def inference_workloads(selection: Selection) -> list[Workload]:
    """Return BERT-base as ``finetune predict`` runs it, at batch sizes in powers of two."""
    sizes = [2**power for power in range(5 if selection.is_quick else 9)]

    def build(device: Device) -> Load:
        model = bert_base()
        place(model, device.torch_device)

        def load(rows: int) -> Steps:
            texts = texts_of(np.resize(selection.lengths, rows))
            padded_lengths = choose_padded_lengths(texts.lengths, device.shapes)
            device.choose_attention(longest_tokens=padded_lengths[-1])
            inputs = inputs_of_texts(texts, takes_4d_mask=bert_structure().takes_4d_mask)
            evaluate = partial(
                predict_logits, model, inputs, padded_lengths=padded_lengths, batch_size=rows,
                device=device,
            )  # fmt: skip
            return {"evaluation": evaluate}

        return load

    return [
        Workload("inference", f"batch {rows}", build, rows, min_rows=rows, phases=("evaluation",))
        for rows in sizes
    ]


def training_workloads(selection: Selection) -> list[Workload]:
    """Return BERT-base trained on a thousand questions, as the article did it and as a run does.

    The article padded every row to 512 tokens and ran the whole model at every step. A run pads to
    the longest row of a batch, and computes the features of a frozen encoder once.
    """
    lengths = np.resize(selection.lengths, ARTICLE_TEXTS)
    sizes = _ARTICLE_BATCH_SIZES[:1] if selection.is_quick else _ARTICLE_BATCH_SIZES
    workloads = []
    for mode in MODES:
        build = _build_article(mode, lengths)
        for rows in sizes:
            name = f"{mode}, {ARTICLE_TOKENS} tokens, batch {rows}"
            workloads.append(Workload("training", name, build, rows))
        name, build = f"{mode}, as finetune run", partial(_build_run, mode, lengths)
        workloads.append(Workload("training", name, build, ARTICLE_TEXTS, min_rows=_BATCH_SIZE))
    return [replace(one, phases=("training",)) for one in workloads]


def _build_article(mode: Mode, lengths: np.ndarray) -> Callable[[Device], Load]:
    def make_model() -> nn.Module:
        model = bert_base()
        if mode != "full":
            model.base_model.requires_grad_(False)
        return model

    def make_batch(rows: int) -> Batch:
        return _text_batch(np.resize(lengths, rows).tolist(), padded_length=ARTICLE_TOKENS)

    return build_module(make_model, make_batch, partial(torch.optim.AdamW, lr=_LEARNING_RATE))


def _build_run(mode: Mode, lengths: np.ndarray, device: Device) -> Load:
    """Return what makes a pass over the first rows ready, of a frozen encoder's features too."""
    model, structure = bert_base(), bert_structure()
    freeze_parameters(model, structure, mode=mode)
    extractor = split_frozen(model, takes_4d_mask=structure.takes_4d_mask, pads_left=False)
    schedule = Schedule(peak=_LEARNING_RATE, warmup_steps=0, total_steps=1)
    state = prepare_training(
        extractor.trainable if extractor else model,
        head=structure.head,
        device=device,
        precision="fp32",
        losses=Single().losses,
        hyperparameters=Hyperparameters(
            "adamw", schedule, head_lr_multiplier=1.0, weight_decay=0.01, max_grad_norm=1.0
        ),
    )
    place(model, device.torch_device)
    padded_lengths = choose_padded_lengths(lengths, device.shapes)

    def load(rows: int) -> Steps:
        device.choose_attention(longest_tokens=padded_lengths[-1])
        inputs = inputs_of_texts(texts_of(lengths[:rows]), takes_4d_mask=structure.takes_4d_mask)
        labels, weights = np.arange(rows) % CLASSES, np.ones(rows, np.float32)

        def train() -> None:
            examples = Examples(inputs.inputs_of, inputs.lengths, labels, weights)
            if extractor:
                # In an empty store any key will do.
                layers = FrozenLayers(extractor, "", device, "fp32", structure.takes_4d_mask)
                with tempfile.TemporaryDirectory() as folder:
                    examples = with_features(
                        examples, layers, TensorStore(Path(folder), limit_bytes=2**30),
                        padded_lengths=padded_lengths, batch_size=64, notes={"split": "train"},
                        emit=ignore,
                    )  # fmt: skip
            batches = plan_epoch(
                examples.lengths, effective_batch_size=_BATCH_SIZE, padded_lengths=padded_lengths,
                seed=SEED, epoch=0,
            )  # fmt: skip
            set_training(state.model)
            for _, cut in move_batches(examples, batches, device=device):
                state.take_step(0, cut(_BATCH_SIZE))

        return {"training": train}

    return load


def read_lengths(data_dir: Path | None) -> list[int]:
    """Return the tokens of TREC's training rows, without a folder of the questions shipped here.

    They are counted without BERT's vocabulary, which may not be at hand.
    """
    data = DataConfig("trec", data_dir=str(data_dir)) if data_dir else DataConfig("questions")
    texts = load_data(data, emit=ignore).splits["train"]["text"]
    splitter = BertPreTokenizer()
    words_of_texts = ([word for word, _ in splitter.pre_tokenize_str(text)] for text in texts)
    return [
        _SPECIAL_TOKENS + sum(1 + (len(word) > _MAX_WHOLE_WORD) for word in words)
        for words in words_of_texts
    ]


def bert_base() -> PreTrainedModel:
    """Return BERT-base for six classes on the CPU, a new one with the same weights each time."""
    return copy.deepcopy(_random_bert())


@cache
def bert_structure() -> Structure:
    """Return the structure of all that ``bert_base`` returns."""
    return find_structure(_random_bert())


@cache
def _random_bert() -> PreTrainedModel:
    return random_classifier("bert-base-uncased", classes=CLASSES, seed=SEED)


def texts_of(lengths: Sequence[int] | NDArray[np.int64]) -> EncodedTexts:
    """Return texts of random tokens for BERT, so many of each."""
    return random_texts(
        np.asarray(lengths, np.int64),
        vocabulary_size=_random_bert().config.vocab_size,
        padding_id=0,
        seed=SEED,
    )
