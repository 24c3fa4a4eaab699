"""How large a batch would be on a machine that is not here.

A step is taken on fake tensors, with what the machine's kernels are known to keep, and its live
bytes are scaled by what measurements have shown beyond them: the allocator's rounding, temporary
memory inside operations, and what the process itself holds.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers.initialization import no_init_weights

from finetune.batch_finder.case import Case
from finetune.batch_finder.live_memory import LiveMemory
from finetune.batch_finder.memory_model import MemoryModel, fit_memory
from finetune.batch_finder.trial import build_trial
from finetune.devices.base import gibibytes
from finetune.devices.cpu import CpuDevice
from finetune.devices.emulation import Kernels, keeping_memory_as
from finetune.errors import ModelUnsupported

_NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
# The first shows the floor. The others are on the line of large batches, whatever the model.
_BATCH_SIZES = (1, 256, 1024)


@dataclass(frozen=True)
class Calibration:
    """What measurements on a device showed: peak bytes = ``offset + slope * live bytes``.

    Args:
        error_share: How far a peak may be from the prediction, as a share of the latter.
        measurements: How many peaks it was fitted to.
        source: Where and how they were measured.
    """

    slope: float
    offset_bytes: int
    error_share: float
    measurements: int
    source: str

    def apply(self, live: MemoryModel) -> MemoryModel:
        """Turn a model of live bytes into one of peak bytes."""
        return MemoryModel(
            floor_bytes=self.offset_bytes + self.slope * live.floor_bytes,
            base_bytes=self.offset_bytes + self.slope * live.base_bytes,
            row_bytes=self.slope * live.row_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class EstimatedSizes:
    """The batch sizes of a step that a machine is estimated to take.

    Args:
        batch: Largest that is expected to fit; 0 where not even one example does.
        lowest_batch: What fits if the memory is underestimated as far as it may be.
        highest_batch: What fits if it is overestimated as far as it may be.
        peak_bytes: Expected peak memory at ``batch``, or at 1 where none is expected to fit.
        basis: What the numbers rest on, for the user.
    """

    batch: int
    lowest_batch: int
    highest_batch: int
    peak_bytes: int
    basis: str


def estimate(case: Case, *, memory_bytes: int, limit: int) -> EstimatedSizes:
    """Estimate the largest batch, up to a limit, that training takes on a device that is not here.

    The process may take ``memory_bytes`` there, its own share included.
    """
    calibration = load_calibration(case)
    expected = calibration.apply(model_live_memory(case))
    most = 1 + calibration.error_share
    largest = map(expected.largest_batch, (memory_bytes, memory_bytes / most, memory_bytes * most))
    batch, lowest, highest = (limit if one is None else min(one, limit) for one in largest)
    return EstimatedSizes(
        batch=batch,
        lowest_batch=lowest,
        highest_batch=highest,
        peak_bytes=round(expected.peak_bytes(max(1, batch))),
        basis=_basis(case, calibration),
    )


def model_live_memory(case: Case) -> MemoryModel:
    """Model the bytes of tensors that are alive at the peak of a step, by the batch size."""
    return fit_memory(dict(zip(_BATCH_SIZES, live_peaks(case, _BATCH_SIZES), strict=True)))


def live_peaks(case: Case, batch_sizes: Sequence[int]) -> list[int]:
    """Take steps one after another; return the most bytes of tensors alive in each.

    The first begins without optimizer state. An evaluation keeps less than a step of the same
    size and is left out.

    Raises:
        ModelUnsupported: If the model can't be split into the case's part, or can't be estimated.
    """
    try:
        return _live_peaks(case, batch_sizes)
    except _NEEDS_NUMBERS as error:
        raise ModelUnsupported(
            f"the memory of {case.architecture['model_type']} can't be estimated: its operations "
            "depend on numbers, and an estimate has shapes alone",
            remedy="search for its batch sizes on the machine itself",
        ) from error


def _live_peaks(case: Case, batch_sizes: Sequence[int]) -> list[int]:
    kernels = Kernels(**_calibrations()[case.device]["kernels"])
    peaks = []
    with (
        # What the examples of a trial take from numpy is real.
        FakeTensorMode(allow_non_fake_inputs=True),
        LiveMemory() as memory,
        keeping_memory_as(kernels),
        no_init_weights(),
    ):
        trial = build_trial(_as_fake(case), device=CpuDevice())
        trial.begin()
        for batch_size in batch_sizes:
            memory.reset_peak()
            trial.take_step(batch_size=batch_size)
            peaks.append(memory.peak_bytes)
    return peaks


def load_calibration(case: Case) -> Calibration:
    """Return what is known of a case's device and of what trains."""
    return Calibration(**_calibrations()[case.device][_part_at_work(case)])


def _as_fake(case: Case) -> Case:
    """Return the case nearest to a case that fake tensors of the CPU can take."""
    # Where a model with trainable layers can be split depends on the tensors' values; unsplit, its
    # frozen layers run as well and keep nothing.
    part = "whole" if case.part == "trainable" and _part_at_work(case) == "core" else case.part
    # The CPU has no fp16, and numbers of bf16 are as large.
    return dataclasses.replace(case, part=part, precision=case.precision.replace("fp16", "bf16"))


def _part_at_work(case: Case) -> str:
    """Return what decides the peak: the encoder's graph, or no more of it than its forward."""
    has_encoder_graph = case.part != "features" and case.mode.trains_encoder
    return "core" if has_encoder_graph else "head"


def _basis(case: Case, calibration: Calibration) -> str:
    encoder = "trains" if _part_at_work(case) == "core" else "is frozen"
    origin = f"{calibration.measurements} measurements on {case.device} where the encoder {encoder}"
    if not calibration.measurements:
        origin = f"no measurements of this project's own on {case.device}"
    return (
        f"the live tensors of a step, times {calibration.slope:.2f}, plus "
        f"{gibibytes(calibration.offset_bytes)}: from {origin}; {calibration.source}"
    )


@cache
def _calibrations() -> dict[str, dict[str, dict[str, Any]]]:
    text = files("finetune.batch_finder").joinpath("calibration.json").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, dict[str, Any]]], json.loads(text))
