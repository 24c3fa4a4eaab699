"""What is left to Accelerate: placement, autocast, gradient scaling, trackers."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn

from finetune.devices.base import Device, place
from finetune.errors import FinetuneError, UsageError
from finetune.training.clipping import clip_gradients

# Those in which a process has the whole model; gradients are added up by TrainingState.
_SEVERAL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
ACCELERATE_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
TRACKER_PROJECT = "finetune"
TRACKERS_OF_EXTRAS = {"tensorboard"}
RUN_NAME_OF_TRACKER = {"mlflow": "run_name"}


class Accelerator:
    """Places a model on a device and runs its arithmetic in a precision.

    Args:
        device: Where to train.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UsageError: If Accelerate was configured to split the model over processes.
    """

    def __init__(self, device: Device, *, precision: str) -> None:
        # Accelerate keeps device and precision for the whole life of a process and refuses others,
        # but a process may run this tool twice.
        AcceleratorState._reset_state(reset_partial_state=True)
        self._accelerator = accelerate.Accelerator(
            cpu=device.torch_device.type == "cpu",
            mixed_precision=ACCELERATE_PRECISION[precision],
            # Given as a plugin, it goes before Accelerate's own variable in the environment:
            # micro-batches have their share of the loss already.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        if self._accelerator.distributed_type not in _SEVERAL:
            raise UsageError(
                f"Accelerate is configured for {self._accelerator.distributed_type.value}, and "
                "each process of a run has the whole model",
                remedy="choose multi-GPU or multi-CPU with accelerate config, or use torchrun",
            )
        self.precision = precision
        self._scales_in_step = device.fused_adamw_scales_gradients
        self._scaler = self._accelerator.scaler
        self._first_scale = self._scaler.get_scale() if self._scaler else 1.0

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are scaled, as in fp16; a step may then be skipped."""
        return self._scaler is not None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass; waits for the device in fp16."""
        return self._scaler.get_scale() if self._scaler else 1.0

    def prepare(self, model: nn.Module) -> nn.Module:
        """Place a model and let its forward run in the precision; its outputs stay fp32.

        It is not wrapped for several processes either: ``TrainingState`` adds up the gradients.
        """
        place(model, self._accelerator.device)
        # Accelerate wraps what is trained: DDP would wait for other processes inside of backward,
        # where memory may run out in one of them.
        prepared: nn.Module = self._accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        return prepared

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return a copy of a prepared model with the forward that it had before."""
        unwrapped: nn.Module = self._accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        return unwrapped

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which a forward without gradients runs in the precision."""
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients to those of the parameters."""
        self._accelerator.backward(loss)

    def clip_gradients(self, optimizer: torch.optim.Optimizer, *, max_norm: float) -> None:
        """Scale the gradients of an optimizer to a norm of at most ``max_norm``."""
        if self._scaler:
            self._scaler.unscale_(optimizer)
        scales_in_step = self._scales_in_step and bool(optimizer.defaults.get("fused"))
        clip_gradients(optimizer, max_norm=max_norm, scales_in_step=scales_in_step)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer change its parameters, unless fp16's gradients are infinite.

        It is not wrapped: Accelerate's own inspects a signature in every step and looks for a
        package in all folders, which a head's steps feel.
        """
        if self._scaler:
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            optimizer.step()

    def skip_step(self) -> None:
        """Let fp16's gradient scaling expect new gradients; waits for the device.

        Gradients that were clipped are no longer scaled, which PyTorch remembers until a scale is
        chosen. Without a step it stays as it is.
        """
        if self._scaler is not None:
            # Before anything was scaled there is no scale to choose.
            self._scaler.scale(torch.zeros((), device=self._accelerator.device))
            self._scaler.update(self._scaler.get_scale())

    def skipped_steps(self) -> int:
        """Return how many of the first steps fp16's gradient scaling left out as too large.

        Each halves the scale, which grows again only after 2,000 good ones. Waits for the device.
        """
        if self._scaler is None:
            return 0
        return max(0, round(math.log2(self._first_scale / self._scaler.get_scale())))

    def scaler_state(self) -> dict[str, float]:
        """Return what fp16's gradient scaling must remember; empty in other precisions."""
        return dict(self._scaler.state_dict()) if self._scaler else {}

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Go on with a gradient scaling where it was left."""
        if self._scaler:
            self._scaler.load_state_dict(state)
            self._first_scale = self._scaler.get_scale()


def check_tracker(name: str) -> None:
    """Raise ``UsageError`` if the package of a tracker, such as ``tensorboard``, is missing."""
    if name not in map(str, get_available_trackers()):
        package = f"'finetune-mps[{name}]'" if name in TRACKERS_OF_EXTRAS else name
        raise UsageError(
            f"to report to {name}, its package is needed", remedy=f"pip install {package}"
        )


def start_tracker(name: str, *, folder: Path, hyperparameters: Mapping[str, Any]) -> Any:
    """Return one of Accelerate's trackers, ready to ``log(values, step=...)`` and to ``finish()``.

    Args:
        name: As Accelerate names it; its package is there.
        folder: Of the run. Its name is the tracker's run; files, if any are local, lie in it.
        hyperparameters: Numbers, texts and truth values.

    Raises:
        FinetuneError: If the tracker can't be started.
    """
    kind = LOGGER_TYPE_TO_CLASS[name]
    try:
        if kind.requires_logging_directory:
            tracker = kind(name, folder)
        else:
            tracker = kind(TRACKER_PROJECT, **{RUN_NAME_OF_TRACKER.get(name, "name"): folder.name})
        tracker.start()
        tracker.store_init_configuration(dict(hyperparameters))
    except Exception as error:  # each package has errors of its own
        raise FinetuneError(
            f"{name} can't be started: {' '.join(str(error).split()) or type(error).__name__}",
            remedy=f"look up how to use {name} in its documentation, or leave out --report-to",
        ) from error
    return tracker
