"""Estimates batch sizes for another Mac, from steps on fake tensors."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.initialization import no_init_weights

from finetune.batch_finder.results import Case, Result
from finetune.batch_finder.search import fit_memory
from finetune.batch_finder.trial_model import build_trial_model
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.facts import Mac, max_tokens
from finetune.devices.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    keeping_memory_as,
    tree_leaves,
)
from finetune.errors import ModelUnsupportedError

# Batch sizes of the emulated steps. The first shows the floor; the others are on the linear part.
_BATCH_SIZES = (1, 256, 1024)
# A process holds 0.5 GiB (Python and PyTorch) and this multiple of its live tensors. Calibrated on
# published runs on Macs with 8 to 36 GB, together with the memory that macOS keeps
# (devices/mps/facts.py). The estimates are at most 10% outside of the limits shown by those runs.
_SLOPE, _OFFSET_BYTES, _ERROR_SHARE = 1.44, 2**29, 0.35
BASIS = "Estimated. Checked against published runs on five Macs: docs/batch-sizes.md."


def estimate(case: Case, mac: Mac, *, limit: int) -> Result:
    """Estimate the largest batch, up to a limit, of one part of a model on a Mac."""
    budget_bytes = mac.budget_bytes
    peaks = allocated_peaks(case, _BATCH_SIZES)
    live = fit_memory(dict(zip(_BATCH_SIZES, peaks, strict=True)))
    if tokens := max_tokens(mac.chip):
        limit = min(limit, tokens // case.padded_length)

    def largest_within(process_bytes: float) -> int:
        largest = live.largest_batch((process_bytes - _OFFSET_BYTES) / _SLOPE)
        return limit if largest is None else min(limit, largest)

    batch_size = largest_within(budget_bytes)
    return Result(
        **case.identity(),
        machine=mac.name,
        budget_bytes=budget_bytes,
        peak_bytes=round(_OFFSET_BYTES + _SLOPE * live.peak_bytes(max(1, batch_size))),
        largest=batch_size,
        first_failed=None,
        fastest=None,
        recommended=max(min(1, batch_size), largest_within(budget_bytes / (1 + _ERROR_SHARE))),
        highest=largest_within(budget_bytes * (1 + _ERROR_SHARE)),
        basis=BASIS,
    )


def allocated_peaks(case: Case, batch_sizes: Sequence[int]) -> list[int]:
    """Take one step per batch size. Return the peak bytes of live tensors in each."""
    # Splitting a model needs tensor values, which fake tensors lack. In the whole model,
    # frozen layers run as well, but save nothing for the backward pass.
    part = "whole" if case.part == "trainable" and case.mode.trains_encoder else case.part
    # The CPU has no fp16, and bf16 has as many bytes per value.
    fake_case = replace(case, part=part, precision=case.precision.replace("fp16", "bf16"))
    peaks = []
    try:
        with (
            # The example arrays in a trial are real, not fake tensors.
            FakeTensorMode(allow_non_fake_inputs=True),
            LiveMemory() as memory,
            keeping_memory_as(case.device),
            no_init_weights(),
            # peft moves its adapters to the model's device, which fails for fake tensors.
            patch.object(nn.Module, "to", lambda module, *_, **__: module),
        ):
            model = build_trial_model(fake_case, device=CpuDevice())
            model.begin()
            for batch_size in batch_sizes:
                memory.reset_peak()
                model.take_step(batch_size=batch_size)
                peaks.append(memory.peak_bytes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelUnsupportedError(
            f"the memory of {case.architecture['model_type']} can't be estimated: its operations "
            "depend on values, and an estimate only has shapes",
            remedy="run finetune find-batch on the Mac itself",
        ) from error
    return peaks


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks every storage from its allocation until its last tensor is freed.

    Fake tensors have no values, so a step of any size takes a second and no memory. PyTorch's
    own ``MemTracker`` fails on frozen parameters and takes 12 seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()

    def reset_peak(self) -> None:
        """Restart peak tracking."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if id(storage) not in self._alive:
                self._alive.add(id(storage))
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _forget(self, storage_id: int, size_bytes: int) -> None:
        self._alive.remove(storage_id)
        self.live_bytes -= size_bytes
