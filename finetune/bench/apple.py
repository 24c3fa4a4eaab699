"""The three networks that Apple timed when PyTorch came to the Mac's GPU, with random weights."""

from functools import partial

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from finetune.bench.bert import CLASSES, GIGAFLOPS_A_TOKEN, bert_base, texts_of
from finetune.bench.workload import Batch, ModuleWorkload, Workload
from finetune.tokenization.collate import collate

_PIXELS = 224
_IMAGE_CLASSES = 1000
# Apple does not say how long its texts were.
_TOKENS = 128
# Channels of VGG16's convolutions of 3 by 3; 0 halves the image.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_sgd = partial(torch.optim.SGD, lr=1e-3)


def apple_workloads() -> list[Workload]:
    """Return ResNet-50 with 128 rows a step, BERT-base and VGG16 with 64."""
    return [
        ModuleWorkload(
            group="apple",
            name="ResNet-50",
            rows=128,
            phases=("training", "evaluation"),
            gigaflops=8.2,
            make=_build_resnet50,
            make_batch=lambda rows: {"pixel_values": _images(rows), "labels": _classes(rows)},
            make_optimizer=_sgd,
        ),
        ModuleWorkload(
            group="apple",
            name="BERT-base",
            rows=64,
            phases=("training", "evaluation"),
            gigaflops=GIGAFLOPS_A_TOKEN * _TOKENS,
            make=bert_base,
            make_batch=lambda rows: text_batch([_TOKENS] * rows, padded_length=_TOKENS),
            make_optimizer=_sgd,
        ),
        ModuleWorkload(
            group="apple",
            name="VGG16",
            rows=64,
            phases=("training", "evaluation"),
            gigaflops=31.0,
            make=_build_vgg16,
            make_batch=lambda rows: {"input": _images(rows)},
            make_optimizer=_sgd,
        ),
    ]


def text_batch(lengths: list[int], *, padded_length: int) -> Batch:
    """Return texts as transformers' BERT takes them: token ids, mask of 1 and 0, classes."""
    rows = torch.arange(len(lengths))
    batch = collate(texts_of(lengths), rows.numpy(), padded_length=padded_length)
    mask = batch["attention_mask"].long()
    return {**batch, "attention_mask": mask, "labels": rows % CLASSES}


def _images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, _PIXELS, _PIXELS)


def _classes(rows: int) -> torch.Tensor:
    return torch.arange(rows) % _IMAGE_CLASSES


def _build_resnet50() -> nn.Module:
    # The widths and depths of its config are ResNet-50's.
    config = ResNetConfig()
    config.num_labels = _IMAGE_CLASSES
    return ResNetForImageClassification(config)


def _build_vgg16() -> nn.Module:
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
