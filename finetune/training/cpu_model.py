"""A copy of a model on the CPU, which has its weights for a while."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from finetune.model.feature_extractor import unread_parameters
from finetune.training.accelerator import Accelerator


class CpuModel:
    """A copy of a model that takes memory only while it has the weights.

    Args:
        model: As the accelerator prepared it, on its device.
        accelerator: Prepared it; the copy computes in fp32.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._original, self._unread = model, unread_parameters(model)
        # What the memo of deepcopy has is taken in place of copies.
        memo: dict[int, Any] = {id(one): _without_memory(one) for one in model.parameters()}
        memo |= {id(one): one.cpu() for one in model.buffers()}
        self._model = accelerator.unwrap(copy.deepcopy(model, memo)).eval()

    @contextmanager
    def with_weights(self) -> Iterator[nn.Module]:
        """Yield the copy, in evaluation mode, with the weights that the model has now.

        They take memory again, but for those below stored features, which no forward reads.
        """
        mine = dict(self._model.named_parameters())
        for name, one in self._original.named_parameters():
            if name not in self._unread:
                mine[name].data = one.detach().cpu()
        try:
            yield self._model
        finally:
            for one in mine.values():
                one.data = _without_memory(one).data


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    return nn.Parameter(zeros, requires_grad=parameter.requires_grad)
