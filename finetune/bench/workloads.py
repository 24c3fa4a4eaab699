"""Workloads for timing devices: published networks, and optionally a model of the user."""

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from finetune.batch_finder.results import Case, architecture_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.bench import Group, Phase
from finetune.bench.results import ARTICLE_TEXTS, ARTICLE_TOKENS, Row
from finetune.config.mode import Mode
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.devices.base import Device
from finetune.devices.private import tree_iter, tree_map_only
from finetune.events import muted
from finetune.model.load import load_factory, loss_of, random_classifier
from finetune.model.structure import find_structure, freeze_parameters, set_training
from finetune.model.tensor_store import TensorStore
from finetune.runs.features import with_features
from finetune.tokenization.encode import EncodedTexts, random_texts
from finetune.tokenization.examples import (
    Examples,
    choose_padded_lengths,
    inputs_of_texts,
    plan_epoch,
)
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
# Published training steps: the network, the mode, tokens and rows.
_TRAINING_STEPS = [
    *(
        ("BERT-base", mode, ARTICLE_TOKENS, rows)
        for mode in ("full", "classifier")
        for rows in (1, 32, 64)
    ),
    ("BERT-base", "full", 128, 64),
    ("BERT-base", "full", ARTICLE_TOKENS, 16),
    ("DistilBERT", "last-1", ARTICLE_TOKENS, 16),
]
_LEARNING_RATE = 5e-5
_BATCH_SIZE = 32

Batch = Mapping[str, Any]
Steps = Mapping[Phase, Callable[[], object]]
"""A training step on some rows, or computing their logits without gradients."""
MakeSteps = Callable[[int], Steps]
"""Prepares N rows, and returns the steps on them."""


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
        """Return the row of a phase without timings."""
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
        tensors = (part for part in tree_iter(batch) if isinstance(part, torch.Tensor))
        rows = next((len(tensor) for tensor in tensors if tensor.ndim), 1)
        build = build_module(lambda: load_factory(model)[0], lambda _: batch)
        workloads.append(Workload("own", model, build, rows, min_rows=rows))
    return workloads


def build_module(
    make: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Callable[[Device], MakeSteps]:
    """Return a function that builds a module. Without an optimizer, steps only get gradients."""

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

    def workload(widths: Sequence[int]) -> Workload:
        build = build_module(
            lambda: make_mlp(widths), lambda rows: {"input": torch.randn(rows, widths[0])}
        )
        return Workload("mlp", "-".join(map(str, widths)), build, 1024, phases=("training",))

    return [workload([*(scale * width for width in MLP_WIDTHS), 10]) for scale in (1, 4, 16)]


def make_mlp(widths: Sequence[int]) -> nn.Module:
    """Return linear layers of these widths, with ReLU between them."""
    layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(widths)]
    return nn.Sequential(*[*chain.from_iterable(layers)][:-1])


def apple_workloads() -> list[Workload]:
    """Return ResNet-50 with 128 rows per step, BERT-base and VGG16 with 64."""

    def make_images(rows: int, *, name: str = "input") -> Batch:
        return {name: torch.randn(rows, 3, _PIXELS, _PIXELS)}

    def make_labeled_images(rows: int) -> Batch:
        images = make_images(rows, name="pixel_values")
        return {**images, "labels": torch.arange(rows) % _IMAGE_CLASSES}

    sgd = partial(torch.optim.SGD, lr=1e-3)
    texts = partial(_text_batch, [_APPLE_TOKENS])
    return [
        Workload("apple", "ResNet-50", build_module(make_resnet50, make_labeled_images, sgd), 128),
        Workload("apple", "BERT-base", build_module(bert_base, texts, sgd), 64),
        Workload("apple", "VGG16", build_module(make_vgg16, make_images, sgd), 64),
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
    """Return texts of random tokens and these lengths, by default padded to the longest."""
    tokens = torch.from_numpy(np.resize(lengths, rows))
    mask = (torch.arange(padded_length or int(tokens.max())) < tokens[:, None]).long()
    token_ids = mask * torch.randint(_random_bert().config.vocab_size, mask.shape)
    labels = torch.arange(rows) % CLASSES
    return {"input_ids": token_ids, "attention_mask": mask, "labels": labels}


def inference_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return predictions of BERT-base for 1, 2, 4, … texts, padded to the longest of them."""
    build = build_module(bert_base, partial(_text_batch, lengths))
    return [
        Workload("inference", f"batch {rows}", build, rows, min_rows=rows, phases=("evaluation",))
        for rows in (2**power for power in range(5 if is_quick else 9))
    ]


def training_workloads(lengths: Sequence[int], *, is_quick: bool) -> list[Workload]:
    """Return training steps as others published them, and passes over questions as a run makes.

    The published steps pad every row to the same length and run the whole model. A run pads to the
    longest row of a batch, and computes the features of a frozen encoder once.
    """
    workloads = []
    for network, mode, tokens, rows in _TRAINING_STEPS:
        if is_quick and rows > 1 and network == "BERT-base":
            continue
        make_batch = partial(_text_batch, lengths, padded_length=tokens)
        build = build_module(
            partial(_make_published_model, network, Mode(mode)),
            make_batch,
            partial(torch.optim.AdamW, lr=_LEARNING_RATE),
        )
        name = f"{mode}, {tokens} tokens, batch {rows}"
        if network != "BERT-base":
            name = f"{network}, {name}"
        workloads.append(Workload("training", name, build, rows))
    all_lengths = np.resize(lengths, ARTICLE_TEXTS)
    for mode in ("full", "classifier"):
        build = partial(_build_run, Mode(mode), all_lengths)
        name = f"{mode}, as finetune run"
        workloads.append(Workload("training", name, build, ARTICLE_TEXTS, min_rows=_BATCH_SIZE))
    return [replace(workload, phases=("training",)) for workload in workloads]


def _make_published_model(network: str, mode: Mode) -> nn.Module:
    model = bert_base() if network == "BERT-base" else make_distilbert()
    freeze_parameters(model, find_structure(model), mode=mode)
    return model


def make_distilbert() -> PreTrainedModel:
    """Return DistilBERT-base, with the default config of transformers."""
    config = DistilBertConfig()
    config.num_labels = CLASSES
    return DistilBertForSequenceClassification(config)


def _build_run(mode: Mode, lengths: np.ndarray, device: Device) -> MakeSteps:
    """Return the function that prepares a pass over the first rows, as a run makes it."""
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
                    store = TensorStore(Path(folder), limit_bytes=2**30)
                    examples = with_features(
                        examples, trial.frozen_layers, store,
                        padded_lengths=padded_lengths, batch_size=64, split="train",
                    )  # fmt: skip
            batches = plan_epoch(
                examples.lengths, effective_batch_size=_BATCH_SIZE,
                padded_lengths=padded_lengths, seed=SEED, epoch=0,
            )  # fmt: skip
            set_training(trial.trainer.model)
            for _, cut in move_batches(examples, batches, device=device):
                trial.trainer.take_step(0, cut(_BATCH_SIZE))

        return {"training": train}

    return make_steps


def read_lengths(data_dir: Path | None) -> list[int]:
    """Estimate the tokens of each training row of TREC, or of each bundled question."""
    data = DataConfig("trec", data_dir=str(data_dir)) if data_dir else DataConfig("questions")
    with muted():
        texts = load_data(data).splits["train"]["text"]
    return [_SPECIAL_TOKENS + round(len(text) / _CHARACTERS_PER_TOKEN) for text in texts]


def bert_base() -> PreTrainedModel:
    """Return a new BERT-base for six classes on the CPU, always with the same weights."""
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
