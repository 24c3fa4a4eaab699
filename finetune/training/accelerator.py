"""What is left to Accelerate: its configuration, backward, gradient scaling."""

import math

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin

from finetune.devices.base import Device
from finetune.errors import UsageError

# Each process has the whole model; TrainingState sums the gradients.
_WHOLE_MODEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


class Accelerator:
    """Backward and optimizer steps in ``fp32``, ``bf16`` or ``fp16``."""

    def __init__(self, device: Device, *, precision: str) -> None:
        # Accelerate keeps device and precision for the whole life of a process and refuses others,
        # but a process may train twice.
        AcceleratorState._reset_state(reset_partial_state=True)
        self._accelerator = accelerate.Accelerator(
            cpu=device.torch_device.type == "cpu",
            mixed_precision=_PRECISIONS[precision],
            # Takes precedence over Accelerate's environment variable: the losses of micro-batches
            # are weighted already.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        if self._accelerator.distributed_type not in _WHOLE_MODEL:
            raise UsageError(
                f"Accelerate is configured for {self._accelerator.distributed_type.value}, and "
                "each process of a run has the whole model",
                remedy="choose multi-GPU or multi-CPU with accelerate config, or use torchrun",
            )
        self.precision = precision
        self._scaler = self._accelerator.scaler
        self._first_scale = self.loss_scale

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are scaled, as in fp16; a step may then be skipped."""
        return self._scaler is not None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass; waits for the device in fp16."""
        return self._scaler.get_scale() if self._scaler else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients to those of the parameters."""
        self._accelerator.backward(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, in fp16."""
        if self._scaler:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer change its parameters, unless gradients are infinite in fp16."""
        # Accelerate's own optimizer looks for a package in all folders at every step, which slows
        # down the steps of a head.
        if self._scaler:
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            optimizer.step()

    def skip_step(self) -> None:
        """Let fp16's gradient scaling expect new gradients, at the same scale."""
        if self._scaler:
            # PyTorch remembers that gradients have been unscaled until a scale is set, which there
            # is from the first loss on.
            self._scaler.scale(torch.zeros((), device=self._accelerator.device))
            self._scaler.update(self._scaler.get_scale())

    def skipped_steps(self) -> int:
        """Return how many of the first steps were skipped in fp16; waits for the device."""
        # Each halves the scale, which doubles only after 2,000 good ones.
        return max(0, round(math.log2(self._first_scale / self.loss_scale)))

    def scaler_state(self) -> dict[str, float]:
        """Return the state of fp16's gradient scaling; empty in other precisions."""
        return dict(self._scaler.state_dict()) if self._scaler else {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Restore the state of fp16's gradient scaling."""
        if self._scaler:
            self._scaler.load_state_dict(state)
            self._first_scale = self.loss_scale
