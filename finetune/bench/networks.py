"""Networks with random weights: small ones of linear layers, and the three of Apple's chart."""

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from finetune.bench.bert import GIGAFLOPS_A_TOKEN, bert_base, text_batch
from finetune.bench.workload import Batch, Workload, build_module

MLP_WIDTHS = (1024, 512, 256)
_MLP_CLASSES = 10
_MLP_ROWS = 1024
_MLP_SCALES = (1, 4, 16)
_PIXELS = 224
_IMAGE_CLASSES = 1000
# Apple does not say how long its texts were.
_TOKENS = 128
# Channels of VGG16's convolutions of 3 by 3; 0 halves the image.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def mlp_workloads() -> list[Workload]:
    """Return the network as published, and with its widths times 4 and 16."""
    return [_mlp([scale * width for width in MLP_WIDTHS] + [_MLP_CLASSES]) for scale in _MLP_SCALES]


def _mlp(widths: list[int]) -> Workload:
    return Workload(
        group="mlp",
        name="-".join(map(str, widths)),
        build=build_module(
            lambda: make_mlp(widths), lambda rows: {"input": torch.randn(rows, widths[0])}
        ),
        rows=_MLP_ROWS,
        phases=("training",),
        gigaflops=2e-9 * sum(one * other for one, other in pairwise(widths)),
    )


def make_mlp(widths: list[int]) -> nn.Module:
    """Return linear layers of these widths, with ReLU between them."""
    pairs = ((nn.Linear(one, other), nn.ReLU()) for one, other in pairwise(widths))
    *layers, _ = (layer for pair in pairs for layer in pair)
    return nn.Sequential(*layers)


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
