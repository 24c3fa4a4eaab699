"""How large a batch would be on a machine that is not here.

A step is taken on fake tensors, with what the machine's kernels are known to keep. Measurements
have shown how many bytes a process holds beside live tensors.
"""

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from finetune.batch_finder.case import Case
from finetune.batch_finder.history import MemoryModel, fit_memory
from finetune.batch_finder.results import EstimateResult, identity_of, parts_of
from finetune.batch_finder.trial_model import build_trial_model
from finetune.devices.cpu import CpuDevice
from finetune.devices.emulation import keeping_memory_as
from finetune.devices.host import gibibytes
from finetune.devices.mps.chips import Mac
from finetune.errors import ModelUnsupported

_NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
# The first shows the floor. The others are on the line of large batches, whatever the model.
_BATCH_SIZES = (1, 256, 1024)


@dataclass(frozen=True)
class Calibration:
    """What measurements on a device showed: peak bytes = ``offset + slope * live bytes``.

    ``error_share`` says how far a peak may be from the prediction, as a share of the latter, and
    ``source`` what the numbers rest on.
    """

    slope: float
    offset_bytes: int
    error_share: float
    source: str

    def apply(self, live: MemoryModel) -> MemoryModel:
        """Turn a model of live bytes into one of peak bytes."""
        return MemoryModel(
            floor_bytes=self.offset_bytes + self.slope * live.floor_bytes,
            base_bytes=self.offset_bytes + self.slope * live.base_bytes,
            example_bytes=self.slope * live.example_bytes,
        )


def estimate_parts(case: Case, mac: Mac, *, stores_features: bool, limit: int) -> EstimateResult:
    """Estimate the batch sizes, up to a limit, of all parts of a model on a Mac."""
    found = {
        part: estimate(replace(case, part=part), mac, limit=limit)
        for part in parts_of(stores_features=stores_features)
    }
    *_, trained = found.values()
    return replace(
        trained,
        stores_features=stores_features,
        features_batch=found["features"].batch if "features" in found else None,
        peak_bytes=max(one.peak_bytes or 0 for one in found.values()),
    )


def estimate(case: Case, mac: Mac, *, limit: int) -> EstimateResult:
    """Estimate the largest batch, up to a limit, of one part of a model on a Mac."""
    calibration = load_calibration(case)
    expected = calibration.apply(model_live_memory(case))
    most, memory_bytes = 1 + calibration.error_share, mac.budget_bytes
    largest = map(expected.largest_batch, (memory_bytes, memory_bytes / most, memory_bytes * most))
    batch, lowest, highest = (limit if one is None else min(one, limit) for one in largest)
    return EstimateResult(
        **identity_of(case),
        machine=mac.name,
        stores_features=False,
        budget_bytes=memory_bytes,
        features_batch=None,
        peak_bytes=round(expected.peak_bytes(max(1, batch))),
        batch=batch,
        lowest_batch=lowest,
        highest_batch=highest,
        basis=f"the live tensors of a step, times {calibration.slope:.2f}, plus "
        f"{gibibytes(calibration.offset_bytes)}: {calibration.source}",
    )


def model_live_memory(case: Case) -> MemoryModel:
    """Model the bytes of tensors that are alive at the peak of a step, by the batch size."""
    return fit_memory(dict(zip(_BATCH_SIZES, live_peaks(case, _BATCH_SIZES), strict=True)))


def live_peaks(case: Case, batch_sizes: Sequence[int]) -> list[int]:
    """Take steps one after another; return the most bytes of tensors alive in each.

    The first begins without optimizer state. An evaluation keeps less and is left out.
    """
    # Where a model with trainable layers can be split depends on the tensors' values; unsplit, its
    # frozen layers run as well and keep nothing.
    part = "whole" if case.part == "trainable" and _trains_encoder(case) else case.part
    # The CPU has no fp16, and numbers of bf16 are as large.
    fake_case = replace(case, part=part, precision=case.precision.replace("fp16", "bf16"))
    peaks = []
    try:
        with (
            # What the examples of a trial take from numpy is real.
            FakeTensorMode(allow_non_fake_inputs=True),
            LiveMemory() as memory,
            keeping_memory_as(case.device),
            no_init_weights(),
        ):
            model = build_trial_model(fake_case, device=CpuDevice())
            model.begin()
            for batch_size in batch_sizes:
                memory.reset_peak()
                model.take_step(batch_size=batch_size)
                peaks.append(memory.peak_bytes)
    except _NEEDS_NUMBERS as error:
        raise ModelUnsupported(
            f"the memory of {case.architecture['model_type']} can't be estimated: its operations "
            "depend on numbers, and an estimate has shapes alone",
            remedy="search for its batch sizes on the machine itself",
        ) from error
    return peaks


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage from the operation that makes it until the last tensor on it dies.

    Fake tensors have no values, so that a step of any size takes a second and no memory. PyTorch's
    own ``MemTracker`` fails on frozen parameters and takes 12 seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()

    def reset_peak(self) -> None:
        """Follow the peak from now on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _forget(self, address: int, size_bytes: int) -> None:
        self._alive.remove(address)
        self.live_bytes -= size_bytes


def load_calibration(case: Case) -> Calibration:
    """Return what is known of a case's device and of what trains."""
    part = "core" if _trains_encoder(case) else "head"
    text = files("finetune.batch_finder").joinpath("calibration.json").read_text(encoding="utf-8")
    return Calibration(**json.loads(text)[case.device][part])


def _trains_encoder(case: Case) -> bool:
    """Return whether the encoder's graph decides the peak, and not only its forward."""
    return case.part != "features" and case.mode.trains_encoder
