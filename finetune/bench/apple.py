"""The three networks that Apple timed when PyTorch came to the Mac's GPU, with random weights."""

from functools import partial

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from finetune.bench.bert import GIGAFLOPS_A_TOKEN, bert_base, text_batch
from finetune.bench.workload import Batch, Workload, build_module

_PIXELS = 224
_IMAGE_CLASSES = 1000
# Apple does not say how long its texts were.
_TOKENS = 128
# Channels of VGG16's convolutions of 3 by 3; 0 halves the image.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def apple_workloads() -> list[Workload]:
    """Return ResNet-50 with 128 rows a step, BERT-base and VGG16 with 64."""
    sgd = partial(torch.optim.SGD, lr=1e-3)
    networks = (
        ("ResNet-50", 128, 8.2, make_resnet50, _labelled_images),
        ("BERT-base", 64, GIGAFLOPS_A_TOKEN * _TOKENS, bert_base, _texts),
        ("VGG16", 64, 31.0, make_vgg16, lambda rows: {"input": _images(rows)}),
    )
    return [
        Workload(
            group="apple",
            name=name,
            build=build_module(make, make_batch, sgd),
            rows=rows,
            gigaflops=gigaflops,
        )
        for name, rows, gigaflops, make, make_batch in networks
    ]


def _texts(rows: int) -> Batch:
    return text_batch([_TOKENS] * rows, padded_length=_TOKENS)


def _images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, _PIXELS, _PIXELS)


def _labelled_images(rows: int) -> Batch:
    return {"pixel_values": _images(rows), "labels": torch.arange(rows) % _IMAGE_CLASSES}


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
