"""Attention in training, in fewer operations than PyTorch composes it of on MPS.

With gradients there is no kernel for it on MPS, and each operation costs the time of a launch.
PyTorch's composition makes a bool mask additive in each layer, scales query and key, and looks for
rows without a token, where transformers gives every text one (read in PyTorch 2.13's attention.cpp,
not tried on a Mac).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

_Attended = tuple[torch.Tensor, torch.Tensor | None]
_SDPA = "sdpa"


class TrainingAttention:
    """transformers' ``sdpa`` attention, composed otherwise where a model trains in fp32.

    PyTorch composes that of 16 bits in fp32, which is left as it is.

    Args:
        default: transformers' own function, which attends in all other cases.
        device_type: Of the tensors that it is for.
    """

    def __init__(self, default: Callable[..., _Attended], *, device_type: str) -> None:
        self.default, self._device_type = default, device_type
        # All layers of a forward have the same mask.
        self._mask: torch.Tensor | None = None
        self._additive: torch.Tensor | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> _Attended:
        """Attend as transformers' functions do, over query, key and value of 4 dimensions."""
        if (
            attention_mask is None
            or query.shape != key.shape
            or not self._trains(query)
            or any(option is not None for option in options.values())
        ):
            return self.default(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, **options,
            )  # fmt: skip
        scaled = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = torch.matmul(scaled, key.transpose(2, 3)).add_(self._as_additive(attention_mask))
        weights = functional.dropout(scores.softmax(dim=-1), dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), None

    def _trains(self, query: torch.Tensor) -> bool:
        is_fp32_here = query.device.type == self._device_type and query.dtype == torch.float32
        return is_fp32_here and query.requires_grad and torch.is_grad_enabled()

    def _as_additive(self, mask: torch.Tensor) -> torch.Tensor:
        if mask.dtype != torch.bool:
            return mask
        if self._additive is None or mask is not self._mask:
            zeros = torch.zeros_like(mask, dtype=torch.float32)
            self._mask, self._additive = mask, zeros.masked_fill_(~mask, -torch.inf)
        return self._additive


def use_training_attention(device_type: str) -> None:
    """Let transformers attend by ``TrainingAttention`` on a kind of device, in this process."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[_SDPA]
    if not isinstance(attend, TrainingAttention):
        attend = TrainingAttention(attend, device_type=device_type)
        ALL_ATTENTION_FUNCTIONS.register(_SDPA, attend)


def use_default_attention() -> None:
    """Undo ``use_training_attention``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[_SDPA]
    if isinstance(attend, TrainingAttention):
        ALL_ATTENTION_FUNCTIONS.register(_SDPA, attend.default)


@contextmanager
def training_attention(device_type: str) -> Iterator[None]:
    """Do as ``use_training_attention`` for a while."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = TrainingAttention(ALL_ATTENTION_FUNCTIONS[_SDPA], device_type=device_type)
    ALL_ATTENTION_FUNCTIONS[_SDPA] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(_SDPA)
