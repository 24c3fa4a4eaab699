"""Compares a device with the CPU during a run, as it may compute wrongly without an error."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import nn

from finetune import events
from finetune.devices.base import Device
from finetune.devices.batch_size import BatchSize
from finetune.devices.cpu import CpuDevice
from finetune.errors import DeviceDiffers
from finetune.events import Emit
from finetune.model.freeze import set_training
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples
from finetune.training.comparison import Comparison, Difference
from finetune.training.cpu_model import CpuModel
from finetune.training.micro_batches import MicroBatch, cut_batch
from finetune.training.snapshot import Progress
from finetune.training.step_check import StepSample, find_wrong_step, sample_step
from finetune.training.training_state import TrainingState

# Of the time of a run, what checks may take at reports, and all of them before something is saved.
SHARE_AT_REPORTS, SHARE_BEFORE_SAVING = 0.01, 0.02
# A micro-batch has at most so many examples, tokens with padding, and tokens a text.
_EXAMPLES, _TOKENS, _PADDED_LENGTH = 8, 512, 64
# So far below that of training, where it was found for other examples, no gradient overflows.
_LOSS_SCALE_SHARE = 1 / 64
# In bf16 an H200 exceeded the tolerance of one gradient once in 500 checks of 10,000 steps.
_ATTEMPTS_IN_16_BITS = 3


@dataclass(frozen=True)
class CheckedBatches:
    """Which micro-batches are computed twice: few examples, and the same shapes every time.

    One has the fewest tokens, for which attention has been wrong, one as many as is quick.

    Args:
        examples: The training split; where texts have windows, all windows.
        padded_lengths: Those of the run, ascending; none if there is nothing to check.
        batch_size: Of the run.
    """

    examples: Examples
    padded_lengths: Sequence[int]
    batch_size: BatchSize

    def on(self, device: Device, *, seed: Sequence[int]) -> list[MicroBatch]:
        """Return the micro-batches of a seed on a device, the same on each, the longest last."""
        random = np.random.default_rng(seed)
        return [self._pick(length, random, device) for length in self._lengths]

    @cached_property
    def _lengths(self) -> list[int]:
        shortest, *others = [
            one for one in self.padded_lengths if one >= self.examples.lengths.min()
        ]
        return [shortest, *[one for one in others if one <= _PADDED_LENGTH][-1:]]

    def _pick(self, length: int, random: np.random.Generator, device: Device) -> MicroBatch:
        most = min(_EXAMPLES, _TOKENS // length, self.batch_size.examples)
        count = max(most, self.batch_size.device.shapes.min_examples)
        short = np.flatnonzero(self.examples.lengths <= length)
        indices = random.choice(short, count, replace=len(short) < count)
        batch = Batch(indices, padded_length=length)
        [micro_batch] = cut_batch(self.examples, batch, batch_size=count, device=device)
        assert isinstance(micro_batch, MicroBatch), "no example has windows"
        return micro_batch


class DeviceCheck:
    """Computes a few examples on the device and on the CPU, as often as it costs next to nothing.

    Parameters and random numbers stay as they are. It takes memory for a while: on the device as
    much as the gradients, in the machine as much as weights and gradients.

    Args:
        training_state: Between two steps whenever a method is called.
        progress: Where the run stands; what has passed is noted there.
        batches: What is computed.
        emit: Receives a warning if memory does not suffice.
    """

    def __init__(
        self,
        training_state: TrainingState,
        progress: Progress,
        batches: CheckedBatches,
        *,
        emit: Emit,
    ) -> None:
        self._training_state, self._progress = training_state, progress
        self._batches, self._emit = batches, emit
        self._is_on = bool(batches.padded_lengths)
        self._is_first = True
        self._started_at = time.monotonic()
        self._last_seconds, self._all_seconds = 0.0, 0.0
        self._before_step: StepSample | None = None
        if not self._is_on:
            progress.checked_steps = None
        elif progress.checked_steps is None:
            progress.checked_steps = progress.steps

    def check_within(self, share: float) -> float:
        """Check now, if checks then take no more than a share of the run, or if it is the first.

        Returns:
            Seconds that it took.

        Raises:
            DeviceDiffers: If the device computes something else than the CPU.
        """
        if not self._is_on or not (self._is_first or self._is_due(share)):
            return 0.0
        began_at = time.monotonic()
        try:
            self._check()
        except (RuntimeError, MemoryError) as error:
            self._give_up_without_memory(error)
        self._is_first = False
        self._last_seconds = time.monotonic() - began_at
        self._all_seconds += self._last_seconds
        return self._last_seconds

    def check_step(self) -> None:
        """Compare the first step after a check with the optimizer's state.

        Raises:
            DeviceDiffers: If the parameters have changed otherwise.
        """
        before, self._before_step = self._before_step, None
        if before is not None:
            self._raise(find_wrong_step(self._training_state, before))

    def _is_due(self, share: float) -> bool:
        passed_seconds = time.monotonic() - self._started_at
        is_new = self._progress.checked_steps != self._progress.steps
        return is_new and self._all_seconds + self._last_seconds <= share * passed_seconds

    def _check(self) -> None:
        training_state = self._training_state
        # The check's own take as much memory.
        training_state.optimizer.zero_grad(set_to_none=True)
        training_state.model.train(False)
        try:
            with self._cpu_model.with_weights() as cpu_model:
                self._raise(self._find_difference(cpu_model))
        finally:
            set_training(training_state.model)
        self._progress.checked_steps = self._progress.steps
        self._before_step = sample_step(training_state.optimizer)

    def _find_difference(self, cpu_model: nn.Module) -> Difference | None:
        """Return what differs; in 16 bits only if it does for other examples too.

        Rounding exceeds its usual size for some examples; a fault does not depend on them.
        """
        training_state, accelerator = self._training_state, self._training_state.accelerator
        difference = None
        for attempt in range(1 if accelerator.precision == "fp32" else _ATTEMPTS_IN_16_BITS):
            seed = (self._progress.steps, attempt)
            difference = Comparison(
                training_state.model,
                cpu_model,
                there=self._batches.on(training_state.device, seed=seed),
                here=self._batches.on(CpuDevice(), seed=seed),
                losses=training_state.losses,
                precision=accelerator.precision,
                loss_scale=max(1.0, accelerator.loss_scale * _LOSS_SCALE_SHARE),
            ).find_difference()
            if difference is None:
                break
        return difference

    @cached_property
    def _cpu_model(self) -> CpuModel:
        return CpuModel(self._training_state.model, self._training_state.accelerator)

    def _raise(self, difference: Difference | None) -> None:
        if difference is None:
            return
        name, steps = self._training_state.device.name, self._progress.steps
        raise DeviceDiffers(
            f"{name} differs from the CPU after step {steps:,}: {difference}",
            remedy=f"finetune doctor --parity --device {name} shows more; use --device cpu",
        )

    def _give_up_without_memory(self, error: RuntimeError | MemoryError) -> None:
        device = self._training_state.device
        if not any(one.memory.is_out_of_memory(error) for one in (device, CpuDevice())):
            raise error
        self._is_on, self._progress.checked_steps = False, None
        device.memory.release()
        self._emit(
            events.WarningMessage(
                f"memory does not suffice to compare {device.name} with the CPU: the run goes on "
                "without",
                remedy="lower --batch-size, or leave it out with --no-check-device",
            )
        )
