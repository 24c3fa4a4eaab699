"""Helpers for training tests, such as simulated devices, random rows and tiny trainers."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batch_finder.simulated_machines import UnifiedMemoryMac
from numpy.typing import NDArray
from tiny_models import VOCABULARY_SIZE, tiny_model
from torch import nn

from finetune.config.modes import Mode
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.cuda import CAPTURED_SHAPES
from finetune.devices.mps.device import FEW_SHAPES
from finetune.model.structure import find_structure, freeze_parameters, set_training
from finetune.tasks.single import Single
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.examples import Batch, Examples, inputs_of_texts
from finetune.training.loop import TrainingLoop
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.plan import Plan

CLASSES = 6

# With tensors this small, two threads spend more time waiting for each other than computing.
torch.set_num_threads(1)


def simulate_memory(
    mac: UnifiedMemoryMac, monkeypatch: pytest.MonkeyPatch, *, counts_peak: bool = True
) -> None:
    """Make PyTorch report the memory of a simulated Mac, with the peak if ``counts_peak``."""

    def max_memory_allocated() -> int:
        if not counts_peak:
            raise RuntimeError("Allocator for mps is not a DeviceAllocator.")
        return mac.peak_bytes

    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: mac.live_bytes)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: mac.driver_bytes)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: mac.recommended_bytes)
    monkeypatch.setattr(torch.mps, "empty_cache", mac.empty_cache)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", max_memory_allocated)


class FewShapesDevice(CpuDevice):
    """The CPU with the batch shapes of MPS."""

    def __init__(self, *, min_examples: int = 1) -> None:
        super().__init__()
        self.shapes = replace(FEW_SHAPES, min_examples=min_examples)


def device_with_cuda_shapes() -> CpuDevice:
    """Return the CPU with the batch shapes of CUDA."""
    device = CpuDevice()
    device.shapes = CAPTURED_SHAPES
    return device


class OtherDevice(FewShapesDevice):
    """The CPU, treated as a device that is compared with the CPU."""

    name = "other"
    is_reference = False
    has_silent_faults = True


def random_texts(rows: int = 23) -> EncodedTexts:
    """Return reproducible texts of 3 to 12 random, non-special tokens."""
    random = np.random.default_rng(rows)
    lengths = random.integers(3, 13, size=rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(5, VOCABULARY_SIZE - 1, size=offsets[-1], dtype=np.int32)
    return EncodedTexts(
        {"input_ids": tokens}, offsets, {"input_ids": 0}, pads_left=False, truncated_texts=0
    )


def random_examples(
    rows: int = 23, *, class_weights: NDArray[np.float32] | None = None, takes_4d_mask: bool = True
) -> Examples:
    """Return random texts with random classes."""
    texts = random_texts(rows)
    labels = np.random.default_rng(rows).integers(0, CLASSES, size=rows)
    weights = np.ones(CLASSES, np.float32) if class_weights is None else class_weights
    inputs = inputs_of_texts(texts, takes_4d_mask=takes_4d_mask)
    return Examples(inputs.inputs_of, inputs.lengths, labels, weights[labels])


def tiny_plan(**values: Any) -> Plan:
    """Return a plan with these options and numbers of steps, which doesn't save."""
    options = {
        "learning_rate": 1e-3, "warmup_fraction": 0.0, "weight_decay": 0.01, "seed": 0,
        "head_lr_multiplier": 1.0, "precision": "fp32", "early_stopping_patience": 0,
        "logging_steps": 1, "save_strategy": "no", **values,
    }  # fmt: skip
    numbers = {name: options.pop(name) for name in [*options] if name not in OPTIONS}
    return Plan(change_options(Config(), options), **numbers)


def tiny_trainer(
    *,
    architecture: str = "bert",
    mode: str = "full",
    device: Device | None = None,
    total_steps: int = 12,
    dropout: float = 0.1,
    **options: Any,
) -> TrainingLoop:
    """Return a reproducible trainer of a small model, ready for steps.

    Options are further values of its plan.
    """
    model = tiny_model(architecture, classes=CLASSES)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    structure = find_structure(model)
    freeze_parameters(model, structure, mode=Mode(mode))
    set_training(model)
    plan = tiny_plan(total_steps=total_steps, warmup_fraction=2 / total_steps, **options)
    device = device or CpuDevice()
    return TrainingLoop(model, plan, task=Single(), device=device, head=structure.head)


def cut_all_rows(
    trainer: TrainingLoop, examples: Examples, *, batch_size: int
) -> Iterator[MicroBatch]:
    """Cut an effective batch of all rows, padded to 16 tokens, for the device of a trainer."""
    return cut_batch(
        examples,
        Batch(np.arange(len(examples.labels)), padded_length=16),
        batch_size=batch_size,
        device=trainer.device,
    )


def take_steps(
    trainer: TrainingLoop, examples: Examples, numbers: Iterable[int], *, batch_size: int = 4
) -> list[float]:
    """Take the steps with these numbers, each on all rows, and return their losses."""
    return [
        trainer.take_step(number, cut_all_rows(trainer, examples, batch_size=batch_size)).item()
        for number in numbers
    ]


def copied_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the current parameters of a model by name."""
    return {name: one.detach().clone() for name, one in model.named_parameters()}
