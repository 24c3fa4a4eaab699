"""Collated rows become what a model's forward takes."""

import torch


def model_inputs(
    tensors: dict[str, torch.Tensor], *, takes_4d_mask: bool
) -> dict[str, torch.Tensor]:
    """Give the attention mask the form that the model reads without asking the device.

    Args:
        tensors: Columns of the batch; ``attention_mask`` is bool of shape [rows, width].
        takes_4d_mask: Whether the model takes a mask of shape [rows, 1, 1, width].
    """
    mask = tensors["attention_mask"]
    ready = mask[:, None, None, :] if takes_4d_mask else mask.long()
    return {**tensors, "attention_mask": ready}
