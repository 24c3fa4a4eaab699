"""Layers that run again in the backward pass: the same gradients from fewer saved tensors."""

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from tiny_training import random_examples
from torch import nn

from finetune.config.mode import Mode
from finetune.devices.cpu import CpuDevice
from finetune.model.freeze import enable_gradient_checkpointing, freeze_parameters, set_training
from finetune.model.structure import find_structure
from finetune.tokenization.examples import Inputs


def train_once(model: nn.Module, inputs: Inputs, *, precision: torch.dtype) -> list[torch.Tensor]:
    """Return the gradients of one backward pass with dropout, and the next random number."""
    set_training(model)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        logits = model(**inputs).logits
    logits.float().square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [*gradients, torch.rand(1)]


@pytest.mark.parametrize("mode", ["full", "last-1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_and_random_numbers_are_those_without_it(architecture: str, mode: str) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = tiny_model(architecture)
        structure = find_structure(model)
        freeze_parameters(model, structure, mode=Mode(mode))
        if is_checkpointed:
            enable_gradient_checkpointing(model, CpuDevice())
        examples = random_examples(4, takes_4d_mask=structure.takes_4d_mask)
        inputs = examples.inputs_of(np.arange(4), 16)
        found.append(train_once(model, inputs, precision=torch.float32))

    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
